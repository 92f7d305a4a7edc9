"""The terminal session of docs/runs.md, "Many runs": each command is run and prints what the page shows."""

import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
from many_runs import make_run, make_sweep, owned
from pages import Page

DAY_S = 86400


def session() -> list[tuple[str, str]]:
    """Return the commands of the section, each with the output below it."""
    section = Page("runs.md").text.partition("\n## Many runs\n")[2].partition("\n## ")[0]
    blocks = re.findall(r"```\n\$ (.*?)```", section, re.DOTALL)
    parts = [part.partition("\n") for block in blocks for part in block.split("\n$ ")]
    return [(command, output) for command, _, output in parts]


def without_details(text: str) -> str:
    """Replace sizes and process ids, which depend on the machine, and the widths of columns."""
    text = re.sub(r"\d[\d.]* [kMG]?B\b", "SIZE", re.sub(r"process \d+", "process N", text))
    return "\n".join(" ".join(line.split()) for line in text.splitlines() if line.strip())


def test_the_session_prints_what_the_page_shows(
    here: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def answer(question: str) -> str:
        print(f"{question}y")
        return "y"

    monkeypatch.setattr("builtins.input", answer)
    outputs = tmp_path / "outputs"
    command = ["python", "-m", "runner", "model=mlp", "optimizer.lr=0.2"]
    facts = {"command": command, "data": "digits", "parallel": "none", "step": 230, "epoch": 10, "seconds": 4.5}
    sweep = make_sweep(outputs / "run" / "sweep-20261120-192348", *["finished"] * 3, "failed", age_s=5 * DAY_S + 9)
    make_run(
        outputs / "run" / "20261122-101500",
        "optimizer.lr=0.3",
        state="running",
        age_s=3 * DAY_S + 9,
        values=(0.3128, 0.2016),
    )
    make_run(outputs / "run" / "20261124-090000", "optimizer.lr=0.2", age_s=DAY_S + 9, values=(0.9806, 0.9778), **facts)
    running = make_run(
        outputs / "wide" / "20261125-083000", state="running", age_s=2 * 3600 + 9, values=(0.9694, 0.9694)
    )
    with owned(running) as (process,):
        for line, expected in session():
            words = shlex.split(line)
            assert words[:4] == ["python", "-m", "runner", "runs"], line
            assert here(*words[3:]) == 0, line
            out, err = capsys.readouterr()
            printed = without_details((out + err).replace(str(tmp_path), "..."))
            assert printed == without_details(expected), line
        process.join(120)
    assert sorted(path.name for path in (outputs / "run").iterdir()) == ["20261124-090000", sweep.name]
    assert len(session()) >= 8
