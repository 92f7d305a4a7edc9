"""parallel=ddp with compressed gradients, beyond the parity matrix: near the exact run, by the formats' bounds."""

from pathlib import Path

import pytest
from worlds import Run, run

from runner.parallel.ddp import DDP

WORDS = ("model=toy", "data=toy", "data.num_train=350", "batch_size=90", "optimizer.lr=0.01", "logger=none", "epochs=9")
STEPS = "max_steps=10"


def distance(one: Run, other: Run) -> float:
    return max((one.weights[name] - tensor).abs().max().item() for name, tensor in other.weights.items())


@pytest.mark.thorough
@pytest.mark.parametrize(("hook", "epsilon", "precision"), [("fp16", 2**-11, "bf16"), ("bf16", 2**-8, "fp32")])
def test_rounded_gradients_miss_by_their_rounding(hook: str, epsilon: float, precision: str, tmp_path: Path) -> None:
    """A rank's gradient is rounded to relative epsilon, and so is their sum: 2 epsilon of each step's move.

    How the error bends the later gradients adds to it, over ten steps of lr 0.01 less than as much again.
    """
    words = (*WORDS, STEPS, f"precision={precision}", "parallel=ddp")
    start = run(tmp_path / "start", 1, *WORDS, "max_steps=1", f"precision={precision}", "optimizer.lr=1e-12")
    exact = run(tmp_path / "exact", 2, *words)
    rounded = run(tmp_path / "rounded", 2, *words, f"parallel.comm_hook={hook}")
    assert 0 < distance(rounded, exact) < 4 * epsilon * distance(exact, start)


def test_powersgd_compresses_from_the_third_step_on(tmp_path: Path) -> None:
    """Rank 1 of a 10 x 10 gradient; what is left out is added to the next, so that no part of the way gets lost."""
    words = (*WORDS, STEPS, "precision=fp64", "parallel=ddp")
    start = run(tmp_path / "start", 1, *WORDS, "max_steps=1", "precision=fp64", "optimizer.lr=1e-12")
    exact = run(tmp_path / "exact", 2, *words)
    low = run(tmp_path / "low", 2, *words, "parallel.comm_hook=powersgd")
    for step in (1, 2, 3):  # the loss of the third is taken before its update
        assert low.losses[step] == pytest.approx(exact.losses[step], rel=1e-9)
    assert low.losses[4] != pytest.approx(exact.losses[4], rel=1e-6)
    assert 0 < distance(low, exact) < 0.5 * distance(exact, start)
    assert low.losses[10] < low.losses[1]


def test_powersgd_goes_on_exactly_on_as_many_ranks_and_says_what_it_drops_on_others(tmp_path: Path) -> None:
    words = (*WORDS, "precision=fp64", "parallel=ddp", "parallel.comm_hook=powersgd")
    whole = run(tmp_path / "whole", 2, *words, STEPS)
    part = run(tmp_path / "part", 2, *words, "max_steps=6")
    run(tmp_path / "part", 2, f"resume={part.path}", STEPS)
    assert part.losses == whole.losses
    assert part.result["weights_sha256"] == whole.result["weights_sha256"]
    said = (part.path / "log.txt").read_text()
    assert "begins anew" not in said
    run(tmp_path / "part", 3, f"resume={part.path}", "max_steps=11")
    said = (part.path / "log.txt").read_text()
    assert "what it had not sent yet is dropped: num_ranks 2 there and 3 here" in said


@pytest.mark.thorough
def test_powersgd_sends_whole_what_its_rank_would_not_make_smaller(tmp_path: Path) -> None:
    words = (*WORDS, STEPS, "precision=fp64", "parallel=ddp")
    exact = run(tmp_path / "exact", 2, *words)
    whole = run(tmp_path / "whole", 2, *words, "parallel.comm_hook=powersgd", "parallel.powersgd_rank=8")
    assert whole.losses == pytest.approx(exact.losses, rel=1e-9)


def test_what_has_no_effect_is_refused() -> None:
    with pytest.raises(ValueError, match=r"powersgd_rank=2 has no effect; try parallel\.comm_hook=powersgd"):
        DDP(powersgd_rank=2)
    with pytest.raises(ValueError, match="powersgd_rank=0 must be at least 1"):
        DDP(powersgd_rank=0, comm_hook="powersgd")
