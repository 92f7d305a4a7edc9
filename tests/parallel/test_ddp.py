"""parallel=ddp beyond the parity matrix: PowerSGD, and messages other than gradients."""

from pathlib import Path

import pytest
from parity import COMMON, assert_equal
from ranks import RankError
from torch.nn.parallel import DistributedDataParallel
from worlds import run

from runner.parallel.ddp import DDP

CONVNET = ("model=convnet", "parallel=ddp", "batch_size=8", "max_steps=2", "logger=none")
WORDS = ("model=toy", "data=toy", "data.num_train=350", "batch_size=90", "optimizer.lr=0.01", "logger=none", "epochs=9")
STEPS = "max_steps=10"


def test_buffers_of_synchronized_batch_norm_are_not_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: DistributedDataParallel) -> None:
        raise AssertionError("sends its buffers")

    monkeypatch.setattr(DistributedDataParallel, "_sync_buffers", refuse)
    run(tmp_path, 2, *CONVNET)
    with pytest.raises(RankError, match="sends its buffers"):
        run(tmp_path, 2, *CONVNET, "sync_batchnorm=false")


@pytest.mark.thorough
def test_powersgd_compresses_from_the_third_step_on_and_resumes_exactly(tmp_path: Path) -> None:
    """A matrix of rank 1 approximates a gradient of 10 x 10; the error is added to the next gradient."""
    words = (*WORDS, "precision=fp64", "parallel=ddp")
    exact = run(tmp_path / "exact", 2, *words, STEPS)
    low = run(tmp_path / "low", 2, *words, STEPS, "parallel.comm_hook=powersgd")
    for step in (1, 2, 3):  # the loss of the third step precedes its update
        assert low.losses[step] == pytest.approx(exact.losses[step], rel=1e-9)
    assert low.losses[4] != pytest.approx(exact.losses[4], rel=1e-6)
    assert low.losses[10] < low.losses[1]

    part = run(tmp_path / "part", 2, *words, "parallel.comm_hook=powersgd", "max_steps=6")
    run(tmp_path / "part", 2, f"resume={part.path}", STEPS)
    assert part.losses == low.losses
    assert part.result["weights_sha256"] == low.result["weights_sha256"]
    assert "comm_hook=powersgd restarts" not in (part.path / "log.txt").read_text()
    run(tmp_path / "part", 1, f"resume={part.path}", "max_steps=11")
    assert "drops the gradients that it had not sent yet" in (part.path / "log.txt").read_text()


def test_a_batch_may_have_fewer_samples_than_there_are_ranks(tmp_path: Path) -> None:
    words = ("model=mlp", "model.hidden=[8]", "model.batch_norm=true", "data=toy", "data.num_train=8", "batch_size=2")
    one, three = (run(tmp_path / str(n), n, *words, *COMMON, f"parallel={m}") for n, m in ((1, "none"), (3, "ddp")))
    assert_equal(three, one)


def test_invalid_options_are_refused() -> None:
    with pytest.raises(ValueError, match=r"powersgd_rank=2 has no effect; try parallel\.comm_hook=powersgd"):
        DDP(powersgd_rank=2)
    with pytest.raises(ValueError, match="powersgd_rank=0 must be at least 1"):
        DDP(powersgd_rank=0, comm_hook="powersgd")
