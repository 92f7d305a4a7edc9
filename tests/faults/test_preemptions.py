"""Runs that are preempted several times: every step reads the same samples as in an uninterrupted run."""

import signal
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fault_rig import OVERRIDES, assert_same, before_each_step, cut, send
from worlds import run

from runner.training.trainer import Trainer


def noting(folder: Path) -> Callable[[Trainer, Any], None]:
    """Return a function that records the samples of each step of each rank."""
    folder.mkdir()

    def act(trainer: Trainer, batch: Any) -> None:
        indices = [index for micro_batch in batch.micro_batches for index in micro_batch.indices]
        with (folder / f"rank_{trainer.world.rank}").open("a") as file:
            print(trainer.state.step, *indices, file=file)

    return act


def samples(folder: Path) -> dict[int, list[int]]:
    """Return the sorted samples of each step over all ranks; a step that ran twice has them twice."""
    found: dict[int, list[int]] = defaultdict(list)
    for file in folder.iterdir():
        for step, *indices in (map(int, line.split()) for line in file.read_text().splitlines()):
            found[step] += indices
    return {step: sorted(indices) for step, indices in found.items()}


def both(*acts: Callable[[Trainer, Any], None]) -> Callable[[Trainer, Any], None]:
    return lambda trainer, batch: [act(trainer, batch) for act in acts] and None


@pytest.mark.fault("three preemptions in one epoch", outcome="survived")
@pytest.mark.thorough
def test_three_times_in_one_epoch(tmp_path: Path) -> None:
    """Either rank receives the signal. The steps 17, 22 and 26 are in the second of four epochs."""
    args = (*OVERRIDES, "parallel=ddp")
    with before_each_step(note := noting(tmp_path / "samples of whole")):
        whole = run(tmp_path / "whole", 2, *args)
    note, typed = noting(tmp_path / "samples"), args
    for rank, step in ((1, 17), (0, 22), (1, 26)):
        stopped = cut(tmp_path / "cut", 2, typed, both(note, send(signal.SIGUSR1, rank, step)))
        assert stopped.result["state"] == "preempted" and stopped.result["step"] < 30
        typed = (f"resume={stopped.path}", f"outputs={tmp_path / 'cut'}")
    with before_each_step(note):
        resumed = run(tmp_path / "cut", 2, *typed)
    assert samples(tmp_path / "samples") == samples(tmp_path / "samples of whole")
    assert_same(resumed, whole)


@pytest.mark.thorough
@pytest.mark.fault("another number of ranks after each preemption", outcome="survived")
def test_on_four_ranks_then_one_and_two(tmp_path: Path) -> None:
    """In float64, in which sums over ranks differ only by rounding; each attempt in another mode."""
    args = (*OVERRIDES, "precision=fp64", "optimizer=sgd", "optimizer.lr=0.01")
    with before_each_step(noting(tmp_path / "samples of whole")):
        whole = run(tmp_path / "whole", 1, *args)
    note, typed = noting(tmp_path / "samples"), args
    for world_size, mode, step in ((4, "fsdp", 11), (1, "none", 24)):
        act = both(note, send(signal.SIGTERM, world_size - 1, step))
        stopped = cut(tmp_path / "cut", world_size, (*typed, f"parallel={mode}"), act)
        assert stopped.result["state"] == "preempted" and step < stopped.result["step"] < 60
        typed = (f"resume={stopped.path}", f"outputs={tmp_path / 'cut'}")
    with before_each_step(note):
        resumed = run(tmp_path / "cut", 2, *typed, "parallel=ddp")
    assert samples(tmp_path / "samples") == samples(tmp_path / "samples of whole")
    assert resumed.losses == pytest.approx(whole.losses, rel=1e-8)
    assert resumed.result["metrics"] == pytest.approx(whole.result["metrics"], rel=1e-8)


@pytest.mark.fault("a dataset smaller than the world", outcome="went_on")
def test_fewer_samples_than_ranks(tmp_path: Path) -> None:
    """Three training samples for four ranks, and one validation sample."""
    args = ("model=toy", "data=toy", "data.num_train=3", "data.num_val=1", "batch_size=4", "epochs=6")
    args = (*args, "precision=fp64", "logger=none")
    one, four = run(tmp_path / "1", 1, *args), run(tmp_path / "4", 4, *args, "parallel=fsdp")
    assert four.losses == pytest.approx(one.losses, rel=1e-9) and len(one.losses) == 6
    assert four.result["metrics"] == pytest.approx(one.result["metrics"], rel=1e-9)
