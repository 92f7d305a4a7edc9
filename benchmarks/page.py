"""Shared by benchmarks that write into a page of the documentation: the section and the machine."""

import importlib.metadata
import os
import platform
import shlex
import subprocess
import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DISTRIBUTIONS = ("torch", "torchvision", "lightning", "accelerate", "pytorch-ignite")


@dataclass(frozen=True)
class Section:
    """The part of a page between two marks, which a benchmark writes."""

    begin: str
    end: str

    def check(self, page: Path) -> None:
        """Raise ValueError unless the page has each mark once, in order."""
        text = page.read_text() if page.is_file() else ""
        if text.count(self.begin) != 1 or text.count(self.end) != 1 or text.index(self.begin) > text.index(self.end):
            raise ValueError(
                f"--write={page} must be a file with the lines {self.begin} and {self.end}; try benchmarks/measured.md"
            )

    def check_typed(self, parser: ArgumentParser, page: Path | None) -> None:
        """Exit with status 2 if a page is given that lacks the marks."""
        if page:
            try:
                self.check(page)
            except ValueError as error:
                parser.error(str(error))

    def write(self, page: Path, measured: str) -> None:
        self.check(page)
        before, rest = page.read_text().split(self.begin)
        page.write_text(f"{before}{self.begin}\n\n{measured.strip()}\n\n{self.end}{rest.split(self.end)[1]}")


def facts(load: float, more: Sequence[str] = (), distributions: Sequence[str] = DISTRIBUTIONS) -> str:
    """Return the command, the machine with its load at the start, the versions, and more lines."""
    cpus = Path("/proc/cpuinfo")
    names = cpus.read_text().splitlines() if cpus.exists() else []
    name = next((line.partition(":")[2].strip() for line in names if line.startswith("model name")), platform.machine())
    versions = {"Python": platform.python_version()}
    for distribution in distributions:
        try:
            versions[distribution] = importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    git = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True)
    lines = [
        f"`{shlex.join(['python', f'benchmarks/{Path(sys.argv[0]).name}', *sys.argv[1:]])}`",
        f"{name}, {os.cpu_count()} cores, a load of {load:.1f} before it began; commit "
        f"{git.stdout.strip() or 'unknown'}; " + ", ".join(f"{which} {number}" for which, number in versions.items()),
        *more,
    ]
    return "\n".join(f"- {line}" for line in lines)
