"""Fixtures that several test modules share."""

import gc
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import parity_table
import pytest
from commands import Commands

from runner.cli import main

pytest_plugins = ("devices", "fault_matrix", "google_storage", "leftovers", "object_stores")
gc.disable()  # until the tests are collected, which creates no garbage: saves 0.7 s in each worker

# Dashboards send telemetry and query newer versions over the network. Tests must not.
os.environ.update(MLFLOW_DISABLE_TELEMETRY="true", DO_NOT_TRACK="true", WANDB_ERROR_REPORTING="false")


def pytest_collection_finish() -> None:
    gc.enable()
    gc.freeze()  # collections during tests, and in forked ranks, skip what exists by now


def pytest_unconfigure() -> None:
    gc.unfreeze()  # some objects print a warning if they are never collected


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--parity-table", metavar="FILE", help="write what test_parity.py measures into this file")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    reports = [*terminalreporter.getreports("passed"), *terminalreporter.getreports("failed")]
    outcomes = Counter(value for report in reports for name, value in report.user_properties if name == "fuzz")
    if outcomes:
        terminalreporter.section("random experiments: number, mode, outcome and reason")
        terminalreporter.write("".join(f"{number:5} {outcome}\n" for outcome, number in sorted(outcomes.items())))
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
    """Run commands in the temporary directory of the test. Commands that still run at its end are killed."""
    own = Commands(tmp_path)
    yield own
    own.close()


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Return a function that runs the runner in this process and in the test's directory, and returns its status."""
    monkeypatch.chdir(tmp_path)

    def run_command(*args: str) -> int:
        monkeypatch.setattr(sys, "argv", ["runner", *args])
        monkeypatch.setattr(sys, "orig_argv", ["runner", *args])
        return main()

    return run_command
