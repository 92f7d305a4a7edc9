"""The example of a stream in docs/data.md, as printed there."""

import json
from pathlib import Path

import pytest
from commands import Commands
from pages import Page, finish

PAGE = Page("data.md")


@pytest.mark.thorough
def test_the_stream_has_the_same_losses_on_both_command_lines(tmp_path: Path, commands: Commands) -> None:
    PAGE.write(tmp_path)
    losses = []
    lines = [line for line in PAGE.commands if "data=lines" in line]
    for number, line in enumerate(lines):
        small = (
            "precision=fp64",
            "model.dim=8",
            "model.heads=1",
            "model.depth=1",
            "batch_size=8",
            "logger=none",
            f"name={number}",
        )
        done = finish(line, commands, *small)
        assert done.returncode == 0, done.stderr
        assert "a stream of training" in done.stdout or number > 0
        (directory,) = (tmp_path / "outputs" / str(number)).iterdir()
        losses.append(json.loads((directory / "result.json").read_text())["metrics"])
    assert len(losses) == 2 and losses[1] == pytest.approx(losses[0], rel=1e-9)
