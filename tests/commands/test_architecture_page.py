"""The examples of docs/architecture.md, as printed there: each contract's files, and the command behind them."""

import re
import shlex
from pathlib import Path

import pytest
from commands import TORCHRUN, Commands, free_port

PAGE = (Path(__file__).parents[2] / "docs" / "architecture.md").read_text()
FILES = dict(re.findall(r"`(mine/\S+?)`:\n\n```(?:python|yaml)\n(.*?)```", PAGE, re.DOTALL))
COMMANDS = [
    line for block in re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL) for line in block.splitlines() if "mine" in line
]
KINDS = ("model", "data", "loss", "scheduler", "metrics", "callbacks", "parallel", "launcher", "task", "logger")

pytestmark = pytest.mark.thorough


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    for name, content in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    return tmp_path / "mine"


def test_every_kind_has_an_example_that_a_command_uses() -> None:
    options = {tuple(Path(name).parts[1:]) for name in FILES if name.endswith(".yaml")}
    assert {group for group, _ in options} == set(KINDS)
    for group in KINDS:
        chosen = {word.partition("=")[2] for line in COMMANDS for word in line.split() if word.startswith(f"{group}=")}
        assert chosen & {Path(file).stem for kind, file in options if kind == group}, group


@pytest.mark.parametrize("line", COMMANDS)
def test_the_command_runs(line: str, mine: Path, commands: Commands) -> None:
    words = shlex.split(line)
    if "run=last" in words:  # it reads what a training run has left
        assert commands.runner("model=toy", "data=toy", "max_steps=3").returncode == 0
    else:
        words.append("max_steps=6")
    if words[0] == "torchrun":
        words[:1] = [*TORCHRUN, f"--master-port={free_port()}"]
    else:
        assert words.pop(0) == "python"
    done = commands.finish(commands.start(*words))
    assert done.returncode == 0, done.stderr
    newest = max((mine.parent / "outputs" / "run").iterdir(), key=lambda path: path.stat().st_mtime)
    for name, made in (("plot", "loss.png"), ("csv_file", "scalars.csv")):
        if any(word.partition("=")[2] == name for word in words):
            assert (newest / made).stat().st_size > 0
