"""Standard streams that are closed, or that cannot write every character."""

import io
import os
import sys
from collections.abc import Callable

import pytest
from commands import Commands
from worlds import only_run

from runner.process.standard_streams import open_streams

SWEEP = ("-m", "model=toy", "data=toy", "max_steps=1", "logger=none", "seed=0,1")


def close_stdout() -> None:
    os.close(1)
    setattr(sys, "stdout", None)  # noqa: B010
    open_streams()


def write_ascii() -> None:
    sys.stdout = io.TextIOWrapper(open(1, "wb", closefd=False), encoding="ascii")  # noqa: SIM115
    open_streams()


@pytest.mark.fault("a closed standard output", outcome="went_on")
def test_command_discards_output_to_a_closed_stream(commands: Commands) -> None:
    shell = ("sh", "-c", 'exec "$0" -m runner --help model=mlp >&- 2>&-', sys.executable)
    assert commands.finish(commands.start_as(shell)).returncode == 0


@pytest.mark.parametrize(
    ("prepare", "written"),
    [
        pytest.param(close_stdout, "", marks=pytest.mark.fault("a closed standard output", outcome="went_on")),
        pytest.param(write_ascii, " \\xb1 ", marks=pytest.mark.fault("output in ASCII", outcome="went_on")),
    ],
)
def test_sweep_and_its_report_print_what_the_stream_can_write(
    prepare: Callable[[], None], written: str, commands: Commands
) -> None:
    done = commands.forked(*SWEEP, prepare=prepare)
    assert (done.returncode, done.stderr) == (0, "") and written in done.stdout
    for log in only_run(commands.folder).path.glob("*/log.txt"):
        assert "finished: " in log.read_text()
    assert commands.forked("task=report", "run=last", prepare=prepare).returncode == 0
