"""The examples of a page of docs/: the files of mine/, commands that run, and commands that are refused."""

import re
import shlex
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from subprocess import CompletedProcess

from commands import Commands

DOCS = Path(__file__).parents[2] / "docs"


@dataclass(frozen=True)
class Page:
    """A page, by its name in docs/."""

    name: str
    word: str = "mine"  # the commands that contain it are run

    @cached_property
    def text(self) -> str:
        return (DOCS / self.name).read_text()

    @cached_property
    def files(self) -> dict[str, str]:
        """Return the blocks of Python or YAML below a line `mine/...`."""
        return dict(re.findall(r"`(mine/\S+?)`:\n\n```(?:python|yaml)\n(.*?)```", self.text, re.DOTALL))

    @cached_property
    def commands(self) -> list[str]:
        """Return the lines of shell blocks that contain the word."""
        blocks = re.findall(r"```sh\n(.*?)```", self.text, re.DOTALL)
        joined = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
        return [line.partition("  #")[0].strip() for line in joined if self.word in line]

    @cached_property
    def refused(self) -> dict[str, str]:
        """Return the commands after a prompt, each with the output below it."""
        blocks = re.findall(r"```\n\$ (.*?)```", self.text, re.DOTALL)
        parts = [part.partition("\n") for block in blocks for part in block.split("\n$ ")]
        return {command: output.strip() for command, _, output in parts if "mine" in command}

    @property
    def options(self) -> dict[str, set[str]]:
        """Return the options that the YAML files define, by group."""
        found: dict[str, set[str]] = {}
        for path in map(Path, self.files):
            if path.suffix == ".yaml":
                found.setdefault(path.parent.name, set()).add(path.stem)
        return found

    def chosen(self, group: str) -> set[str]:
        """Return the options that commands or presets choose."""
        args = [word for line in (*self.commands, *self.refused) for word in shlex.split(line)]
        overrides = [word.partition("=")[2].strip("[]").split(",") for word in args if word.startswith(f"{group}=")]
        presets = [content for name, content in self.files.items() if "/experiment/" in name]
        overridden = [re.findall(rf"override /{group}: (\w+)", content) for content in presets]
        return {option for options in (*overrides, *overridden) for option in options}

    def write(self, directory: Path) -> Path:
        """Write the files, and return the path of mine/ in the directory."""
        for name, content in self.files.items():
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            (directory / name).write_text(content)
        return directory / "mine"


def finish(line: str, commands: Commands, *more: str) -> CompletedProcess[str]:
    """Fork a command of a page with further arguments, or the two ranks that torchrun or launcher=spawn would start."""
    before, _, typed = line.partition(" -m runner ")
    assert before in ("python", "torchrun --nproc-per-node 2")
    args = [*shlex.split(typed), *more]
    if before == "python" and "launcher=spawn" not in args:
        return commands.forked(*args)
    ranks = commands.forked_world(2, *(arg for arg in args if arg != "launcher=spawn"))
    return max(ranks, key=lambda rank: rank.returncode != 0)  # the first rank that failed, or else rank 0
