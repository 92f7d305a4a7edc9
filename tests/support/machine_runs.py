"""Runs on machines that an engine reaches, such as ssh: the words of their commands, and what holds for each engine."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from subprocess import Popen

import pytest
from commands import Commands, newest_step, wait_until
from custom_files import SLOWLY
from worlds import Run, only_run, run

TINY = ("model=mlp", "parallel=ddp", "threads=1", "logger=none", "backend=gloo", "epochs=1")
LONG = (
    "model=mlp", "parallel=ddp", "threads=1", "logger=none", "backend=gloo", "epochs=1000", *SLOWLY,
    "backend.timeout_s=8", "checkpoint.every_steps=20",
)  # fmt: skip
JOB = tuple(word for word in LONG if word != "parallel=ddp")  # of a sweep, on one machine


def run_undisturbed(folder: Path, num_ranks: int, *words: str) -> Run:
    """Run a command of LONG or JOB here, without its delays."""
    return run(folder / "whole", num_ranks, *[word for word in words if word not in SLOWLY])


def check_end_with_command(
    process: Popen[str], number: signal.Signals, commands: Commands, folder: Path, wait_until_idle: Callable[[], None]
) -> None:
    """Send the signal to the command of a run of two ranks. They save and exit, also if it was SIGKILL."""
    wait_until(lambda: newest_step(folder) >= 20, process)
    os.killpg(process.pid, number)
    assert commands.finish(process).returncode == (143 if number == signal.SIGINT else -number)
    wait_until_idle()
    result = only_run(folder).result
    assert result["state"] == "preempted" and newest_step(folder) == result["step"]


def check_equal(one: Run, whole: Run) -> None:
    """Compare the losses and weights of two runs with precision=fp64, up to rounding."""
    assert one.result["state"] == "finished"
    assert one.losses == pytest.approx(whole.losses, rel=1e-9)
    for name, weight in whole.weights.items():
        assert (one.weights[name] - weight).abs().max() <= 1e-9 * weight.abs().max(), name
