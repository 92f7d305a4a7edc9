"""parallel=ddp with PowerSGD, beyond the parity matrix."""

from pathlib import Path

import pytest
from worlds import Run, run

from runner.parallel.ddp import DDP

WORDS = ("model=toy", "data=toy", "data.num_train=350", "batch_size=90", "optimizer.lr=0.01", "logger=none", "epochs=9")
STEPS = "max_steps=10"


def distance(one: Run, other: Run) -> float:
    return max((one.weights[name] - tensor).abs().max().item() for name, tensor in other.weights.items())


def test_powersgd_compresses_from_the_third_step_on(tmp_path: Path) -> None:
    """A matrix of rank 1 approximates a gradient of 10 x 10; the error is added to the next gradient."""
    words = (*WORDS, STEPS, "precision=fp64", "parallel=ddp")
    start = run(tmp_path / "start", 1, *WORDS, "max_steps=1", "precision=fp64", "optimizer.lr=1e-12")
    exact = run(tmp_path / "exact", 2, *words)
    low = run(tmp_path / "low", 2, *words, "parallel.comm_hook=powersgd")
    for step in (1, 2, 3):  # the loss of the third step precedes its update
        assert low.losses[step] == pytest.approx(exact.losses[step], rel=1e-9)
    assert low.losses[4] != pytest.approx(exact.losses[4], rel=1e-6)
    assert 0 < distance(low, exact) < 0.5 * distance(exact, start)
    assert low.losses[10] < low.losses[1]


def test_powersgd_resumes_exactly_on_the_same_number_of_ranks(tmp_path: Path) -> None:
    words = (*WORDS, "precision=fp64", "parallel=ddp", "parallel.comm_hook=powersgd")
    whole = run(tmp_path / "whole", 2, *words, STEPS)
    part = run(tmp_path / "part", 2, *words, "max_steps=6")
    run(tmp_path / "part", 2, f"resume={part.path}", STEPS)
    assert part.losses == whole.losses
    assert part.result["weights_sha256"] == whole.result["weights_sha256"]
    said = (part.path / "log.txt").read_text()
    assert "comm_hook=powersgd restarts" not in said
    run(tmp_path / "part", 3, f"resume={part.path}", "max_steps=11")
    said = (part.path / "log.txt").read_text()
    assert "drops the gradients that it had not sent yet: num_ranks is 2 in the checkpoint and 3 now" in said


@pytest.mark.thorough
def test_powersgd_does_not_compress_matrices_of_low_rank(tmp_path: Path) -> None:
    words = (*WORDS, STEPS, "precision=fp64", "parallel=ddp")
    exact = run(tmp_path / "exact", 2, *words)
    whole = run(tmp_path / "whole", 2, *words, "parallel.comm_hook=powersgd", "parallel.powersgd_rank=8")
    assert whole.losses == pytest.approx(exact.losses, rel=1e-9)


def test_invalid_options_are_refused() -> None:
    with pytest.raises(ValueError, match=r"powersgd_rank=2 has no effect; try parallel\.comm_hook=powersgd"):
        DDP(powersgd_rank=2)
    with pytest.raises(ValueError, match="powersgd_rank=0 must be at least 1"):
        DDP(powersgd_rank=0, comm_hook="powersgd")
