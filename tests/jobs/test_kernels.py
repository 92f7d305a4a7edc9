"""The kernels that tf32 and cudnn_benchmark choose on GPUs, and the settings of torch after a run."""

import torch

from runner.jobs.process_state import choose_kernels, embedded_run


def settings() -> tuple[str, bool, bool]:
    cudnn = torch.backends.cudnn
    return torch.get_float32_matmul_precision(), cudnn.allow_tf32, cudnn.benchmark


def test_kernels_are_chosen_and_restored() -> None:
    before = settings()
    with embedded_run():
        choose_kernels("convolutions", False)
        assert settings() == ("highest", True, False)
        choose_kernels(True, True)
        assert settings() == ("high", True, True)
        choose_kernels(False, False)
        assert settings() == ("highest", False, True)
    assert settings() == before
