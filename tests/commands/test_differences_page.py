"""The terminal session of docs/differences.md: each command is run and prints what the page shows."""

import re
import shlex

import pytest
from commands import Commands
from pages import Page, finish


def without_values(text: str) -> str:
    """Replace paths, the times of runs and numbers with decimals, which depend on the machine."""
    text = re.sub(r"\S*/outputs/(\w+)/[\w-]+", r".../outputs/\1/STAMP", text)
    return re.sub(r"\d+\.\d+(e-\d+)?", "VALUE", text).strip()


@pytest.mark.thorough
def test_the_session_prints_what_the_page_shows(commands: Commands) -> None:
    session = re.findall(r"```\n\$ (.*?)```", Page("differences.md").text, re.DOTALL)
    parts = [part.partition("\n") for block in session for part in block.split("\n$ ")]
    for line, _, expected in parts:
        for name in re.findall(r"outputs/(\w+)/STAMP", line):
            (run,) = (commands.folder / "outputs" / name).iterdir()
            line = line.replace(f"{name}/STAMP", f"{name}/{run.name}")
        done = finish(line, commands, "threads=1")
        if "task=diff" in shlex.split(line):
            assert without_values(done.stdout) == without_values(expected), done.stdout + done.stderr
            assert done.returncode == ("numbers  differ" in expected)
        else:
            assert done.returncode == 0, done.stderr
    assert len(parts) >= 5
