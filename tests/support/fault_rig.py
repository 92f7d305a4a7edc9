"""A small experiment into which tests inject faults, and the check that a resumed run equals an uninterrupted one."""

import os
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import wait_until
from ranks import RankError
from worlds import Run, run

from runner.checkpoints.layout import choose_checkpoint, list_checkpoints
from runner.training.trainer import Trainer

# Four epochs of 15 steps, the last of 37 samples; BatchNorm with running statistics; a checkpoint every 7 steps.
STEPS = 60
OVERRIDES = (
    *("model=convnet", "model.channels=[4,8]", "data.sample_shape=[1,8,8]", "batch_size=100", "epochs=4"),
    *("optimizer=adamw", "scheduler=cosine", "logger=none", "checkpoint.every_steps=7", "checkpoint.keep_best=0"),
)


@contextmanager
def before_each_step(act: Callable[[Trainer, Any], None]) -> Iterator[None]:
    """Call `act(trainer, batch)` before each step of the ranks that are forked during the block."""
    step = Trainer.step

    def act_and_step(self: Trainer, batch: Any, *args: Any) -> Any:
        act(self, batch)
        return step(self, batch, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "step", act_and_step)
        yield


def cut(outputs: Path, world_size: int, overrides: tuple[str, ...], act: Callable[[Trainer, Any], None]) -> Run:
    """Start or resume a run that `act` ends before one of its steps. Return the run."""
    with before_each_step(act), pytest.raises(RankError):
        run(outputs, world_size, *overrides)
    (path,) = (outputs / "run").iterdir()
    return Run(path)


def send(number: signal.Signals, rank: int, step: int, once_saved: int | None = None) -> Callable[[Trainer, Any], None]:
    """Return a function that sends the signal in a step, when the checkpoint of step `once_saved` is complete."""

    def act(trainer: Trainer, batch: Any) -> None:
        if trainer.world.rank == rank and trainer.state.step == step:
            if once_saved is not None:
                (path,) = Path(trainer.config.outputs, trainer.config.name).iterdir()
                wait_until((path / "checkpoints" / f"step_{once_saved}").exists)  # it is written in the background
            os.kill(os.getpid(), number)

    return act


def assert_same(one: Run, whole: Run) -> None:
    """Compare bit for bit: weights, statistics, optimizer state, position, logged losses, and metrics."""
    for key in ("weights_sha256", "step", "epoch", "state", "metrics"):
        assert one.result[key] == whole.result[key], key
    assert one.losses == whole.losses
    newest, expected = (list_checkpoints(each.path / "checkpoints")[-1] for each in (one, whole))
    assert newest.name == expected.name
    assert (newest / "progress.json").read_bytes() == (expected / "progress.json").read_bytes()
    assert differences(one.state, whole.state) == []


def differences(one: Any, other: Any, name: str = "") -> list[str]:
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        if one.keys() != other.keys():
            return [f"{name}: {sorted(map(str, one.keys() ^ other.keys()))}"]
        return [line for key in one for line in differences(one[key], other[key], f"{name}.{key}")]
    if isinstance(one, torch.Tensor):
        return [] if torch.equal(one, other) and one.dtype == other.dtype else [name]
    return [] if one == other else [name]


def all_sound(checkpoints: Path) -> list[str]:
    """Return the names of all checkpoints. Raise ValueError if one is damaged."""
    return [choose_checkpoint(checkpoints, path.name).name for path in list_checkpoints(checkpoints)]
