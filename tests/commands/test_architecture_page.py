"""The examples of docs/architecture.md, as printed there: each contract's files, and the command behind them."""

import re
from pathlib import Path

import pytest
from commands import Commands
from pages import Page, finish

PAGE = Page("architecture.md")
KINDS = {"model", "scheduler", "callbacks", "parallel", "launcher", "task", "logger"}  # the others are on other pages

pytestmark = pytest.mark.thorough


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    return PAGE.write(tmp_path)


def test_every_kind_has_an_example_that_a_command_uses() -> None:
    assert set(PAGE.options) == KINDS
    for group, options in PAGE.options.items():
        assert PAGE.chosen(group) & options, group


@pytest.mark.parametrize("line", PAGE.commands)
def test_the_command_runs(line: str, mine: Path, commands: Commands) -> None:
    reads = "run=last" in line  # a file of the training run
    if reads:
        assert commands.forked("model=toy", "data=toy", "max_steps=3").returncode == 0
    done = finish(line, commands, *([] if reads else ["max_steps=6"]))
    assert done.returncode == 0, done.stderr
    if "parallel=pipeline" in line:
        assert re.search(r"pipeline rank 1: stages 1 of 2, \d+\.\d% of the parameters", done.stdout), done.stdout
    newest = max((mine.parent / "outputs" / "run").iterdir(), key=lambda path: path.stat().st_mtime)
    if "csv_file" in line:
        assert (newest / "scalars.csv").stat().st_size > 0
