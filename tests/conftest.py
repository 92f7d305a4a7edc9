"""Fixtures that several test modules share."""

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import parity_table
import pytest
import torch
from commands import Commands

from runner.main import main

pytest_plugins = ("fault_matrix", "leftovers")

# The first backward of a process decides which threads autograd starts, after which no forked rank can go backward. It
# must come before any test has a FakeTensorMode, with which torch counts a GPU that is not there.
torch.ones((), requires_grad=True).backward()


# Dashboards count their users, and ask for newer versions, over the network: no test does.
os.environ.update(MLFLOW_DISABLE_TELEMETRY="true", DO_NOT_TRACK="true", WANDB_ERROR_REPORTING="false")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--parity-table", metavar="FILE", help="write what test_parity.py measures into this file")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    file = config.getoption("--parity-table")
    passed = terminalreporter.getreports("passed") if file else []
    cells = [
        parity_table.Cell(**value) for report in passed for name, value in report.user_properties if name == "parity"
    ]
    if cells:
        table = parity_table.render(cells)
        parity_table.write(Path(file), table)
        terminalreporter.section("parity matrix")
        terminalreporter.write(table)


@pytest.fixture
def commands(tmp_path: Path) -> Iterator[Commands]:
    """Commands that run in the test's own folder. Those that still run at its end are killed."""
    own = Commands(tmp_path)
    yield own
    for process in own.started:
        if process.poll() is None:  # what one that has ended leaves behind fails the test: support/leftovers.py
            own.kill(process)
        assert process.stdout and process.stderr
        process.stdout.close()
        process.stderr.close()


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Runs a command of the runner in this process, in the test's own folder. Returns its status."""
    monkeypatch.chdir(tmp_path)

    def type_words(*words: str) -> int:
        monkeypatch.setattr(sys, "argv", ["runner", *words])
        monkeypatch.setattr(sys, "orig_argv", ["runner", *words])
        return main()

    return type_words
