"""The examples of a page of docs/ as printed there: the files of a folder mine/, commands that run, refused ones."""

import re
import shlex
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from subprocess import CompletedProcess

from commands import TORCHRUN, Commands, free_port

DOCS = Path(__file__).parents[2] / "docs"


@dataclass(frozen=True)
class Page:
    """A page by its name in docs/."""

    name: str

    @cached_property
    def text(self) -> str:
        return (DOCS / self.name).read_text()

    @cached_property
    def files(self) -> dict[str, str]:
        """What is under a line `mine/...`: in a block of Python or YAML."""
        return dict(re.findall(r"`(mine/\S+?)`:\n\n```(?:python|yaml)\n(.*?)```", self.text, re.DOTALL))

    @cached_property
    def commands(self) -> list[str]:
        """The lines of blocks of shell that use the folder."""
        blocks = re.findall(r"```sh\n(.*?)```", self.text, re.DOTALL)
        joined = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
        return [line.partition("  #")[0].strip() for line in joined if "mine" in line]

    @cached_property
    def refused(self) -> dict[str, str]:
        """The commands behind a prompt, each with what is printed under it."""
        blocks = re.findall(r"```\n\$ (.*?)```", self.text, re.DOTALL)
        parts = [part.partition("\n") for block in blocks for part in block.split("\n$ ")]
        return {command: said.strip() for command, _, said in parts if "mine" in command}

    @property
    def options(self) -> dict[str, set[str]]:
        """The options that the YAML files are, by group."""
        found: dict[str, set[str]] = {}
        for path in map(Path, self.files):
            if path.suffix == ".yaml":
                found.setdefault(path.parent.name, set()).add(path.stem)
        return found

    def chosen(self, group: str) -> set[str]:
        """The options that commands choose, or the files of presets."""
        words = [word for line in (*self.commands, *self.refused) for word in shlex.split(line)]
        typed = [word.partition("=")[2].strip("[]").split(",") for word in words if word.startswith(f"{group}=")]
        presets = [content for name, content in self.files.items() if "/experiment/" in name]
        overridden = [re.findall(rf"override /{group}: (\w+)", content) for content in presets]
        return {option for options in (*typed, *overridden) for option in options}

    def write(self, folder: Path) -> Path:
        """The folder mine/ in this one."""
        for name, content in self.files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(content)
        return folder / "mine"


def finish(line: str, commands: Commands, *more: str) -> CompletedProcess[str]:
    """The command of a page, with words of one's own behind it, to its end. One that starts no process is forked."""
    words = [*shlex.split(line), *more]
    if words[0] == "torchrun":
        return commands.finish(commands.start(*TORCHRUN, f"--master-port={free_port()}", *words[1:]))
    assert words[:3] == ["python", "-m", "runner"]
    return commands.runner(*words[3:]) if "launcher" in line else commands.forked(*words[3:])
