"""docs/bring_your_script.md, as printed there: the script, and the commands that train the same."""

import json
import re
import runpy
from pathlib import Path

import pytest
from commands import Commands
from pages import Page, finish

PAGE = Page("bring_your_script.md")


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return PAGE.write(tmp_path)


def test_the_script_and_the_runner_print_the_same_numbers(
    mine: Path, commands: Commands, capsys: pytest.CaptureFixture[str]
) -> None:
    runpy.run_path(str(mine / "train_digits.py"), run_name="__main__")
    printed = capsys.readouterr().out
    script, shown = (
        [float(number) for number in re.findall(r"(?:train/loss|val/accuracy) (\d\.\d{4})", text)]
        for text in (printed, PAGE.text)
    )
    assert script == pytest.approx(shown, abs=0.01)
    lines = [line for line in PAGE.commands if "experiment=digits_net" in line and " -m runner" in line]
    one, two = (line for line in lines if "optimizer.lr" not in line)
    for name, line in (("one", one), ("two", two)):
        done = finish(line, commands, f"name={name}", "logger=none")
        assert done.returncode == 0, done.stderr
        assert read_numbers(mine.parent / "outputs" / name) == pytest.approx(script, abs=0.003), line  # rounding


def read_numbers(runs: Path) -> list[float]:
    """Return train/loss and val/accuracy at the end of each epoch."""
    (directory,) = runs.iterdir()
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    merged: dict[int, dict[str, float]] = {}
    for row in rows:
        merged.setdefault(row["step"], {}).update(row)
    ends = [row for _, row in sorted(merged.items()) if "val/accuracy" in row]
    return [value for row in ends for value in (row["train/loss"], row["val/accuracy"])]


@pytest.mark.thorough
@pytest.mark.parametrize("line", [line for line in PAGE.commands if "debug=true" in line or "optimizer.lr" in line])
def test_the_command_runs(line: str, mine: Path, commands: Commands) -> None:
    done = finish(line, commands, *([] if "debug=true" in line else ["max_steps=6", "logger=none"]))
    assert done.returncode == 0, done.stderr
    assert (mine.parent / "outputs").exists()
