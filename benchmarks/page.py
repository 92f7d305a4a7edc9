"""What benchmarks that write into a page of the documentation share: where, on which machine, and how sure it is."""

import importlib.metadata
import os
import platform
import shlex
import statistics
import subprocess
import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MAX_SPREAD = 0.15
DISTRIBUTIONS = ("torch", "torchvision", "lightning", "accelerate", "pytorch-ignite")


@dataclass(frozen=True)
class Section:
    """What a benchmark has measured, between two lines of a page."""

    begin: str
    end: str

    def check(self, page: Path) -> None:
        """Raises ValueError unless the page has a place for it."""
        text = page.read_text() if page.is_file() else ""
        if text.count(self.begin) != 1 or text.count(self.end) != 1 or text.index(self.begin) > text.index(self.end):
            raise ValueError(
                f"--write={page} must be a file with the lines {self.begin} and {self.end}; try docs/benchmarks.md"
            )

    def check_typed(self, parser: ArgumentParser, page: Path | None) -> None:
        """Ends with status 2 where a page was typed that has no place for it."""
        if page:
            try:
                self.check(page)
            except ValueError as error:
                parser.error(str(error))

    def write(self, page: Path, measured: str) -> None:
        self.check(page)
        before, rest = page.read_text().split(self.begin)
        page.write_text(f"{before}{self.begin}\n\n{measured.strip()}\n\n{self.end}{rest.split(self.end)[1]}")


def spread(values: Sequence[float]) -> float | None:
    """The largest less the smallest, as a part of the median; None of fewer than two, which show none."""
    return (max(values) - min(values)) / statistics.median(values) if len(values) > 1 else None


def facts(load: float, more: Sequence[str] = (), distributions: Sequence[str] = DISTRIBUTIONS) -> str:
    """The command, the machine, the versions, and more lines. load: of the machine, before it began."""
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
