"""Copies of code: `code/HASH/` in the directory of a run, or of a sweep, whose jobs share it.

`code.sha256` in a copy lists its files in the format of sha256sum, and HASH is the start of the SHA-256 of this list.
So equal code has one copy, and a reader detects a changed one. A job of a queue runs a copy instead of the original
code: RUNNER_CODE in its environment names the copy, and `code.json` in the copy has the origin of the code.
"""

import functools
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runner.records.ledger import is_sweep
from runner.records.run_files import make_directory, read_bytes

CODE, SUMS, ORIGIN = "code", "code.sha256", "code.json"

Files = Mapping[str, bytes | Path]  # the content of each file of a copy by its path, or the file to which it is a link


@dataclass(frozen=True)
class Origin:
    """The content of code.json."""

    git: dict[str, Any]  # the result of `runner.records.provenance.git_state`
    repositories: dict[str, dict[str, Any]]  # the states of the custom directories' repositories, by path
    places: dict[str, str]  # custom directories and imported modules by their paths in the copy


def new_copy(directory: Path, files: Files) -> Path:
    """Return the path of the copy that has these files, in the directory of a sweep or of a run, or of its sweep."""
    return (directory.parent if is_sweep(directory.parent) else directory) / CODE / hash_of(files)


def find_copies(directory: Path) -> Iterator[Path]:
    """Yield the copies in the directory of a run or a sweep, and in that of the run's sweep."""
    for parent in (directory, directory.parent) if is_sweep(directory.parent) else (directory,):
        yield from (parent / CODE).glob("*")


def write_copy(directory: Path, files: Files) -> Path:
    """Write the copy at `new_copy`, unless it exists, and return its path."""
    path = new_copy(directory, files)
    make_directory(path.parent)
    if path.exists():
        return path
    partial = Path(tempfile.mkdtemp(prefix="partial-", dir=path.parent))
    try:
        for name, content in {**files, SUMS: _list_files(files)}.items():
            file = partial / name
            file.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(content, Path):
                file.symlink_to(content)
            else:
                file.write_bytes(content)
        partial.chmod(0o755)
        try:
            partial.rename(path)
        except OSError:
            if not path.exists():  # otherwise another job of the sweep has written the copy
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return path


def read_copy(path: Path, names: Iterable[str] | None = None) -> dict[str, bytes]:
    """Return the named files of a copy; without names all files.

    Raises OSError, ValueError or KeyError if a file is missing, or does not have the content that was copied.
    """
    sums = read_bytes(path / SUMS)
    if hashlib.sha256(sums).hexdigest()[:12] != path.name:
        raise ValueError(f"{SUMS} has changed")
    digests = dict(line.split("  ", 1)[::-1] for line in sums.decode().splitlines() if not line.startswith("# "))
    found = {}
    for name in digests if names is None else names:
        if not (path / name).resolve().is_relative_to(path.resolve()):
            raise ValueError(name)
        found[name] = read_bytes(path / name)
        if hashlib.sha256(found[name]).hexdigest() != digests[name]:
            raise ValueError(f"{name} has changed")
    return found


def hash_of(files: Files) -> str:
    """Return HASH of the copy that has these files."""
    return hashlib.sha256(_list_files(files)).hexdigest()[:12]


def running_copy() -> tuple[Path, Origin] | None:
    """Return the copy whose code this process runs, and its origin; None if it runs the original code."""
    if not (path := os.environ.get("RUNNER_CODE")):
        return None
    return Path(path), _origin_of(Path(path))


@functools.cache
def _origin_of(copy: Path) -> Origin:
    """Return the origin of the code in a copy, which does not change."""
    return Origin(**json.loads((copy / ORIGIN).read_text()))


def original_path(path: str) -> str:
    """Return the path of the original of a file in the running copy; `path` itself for another file."""
    if copy := running_copy():
        for name, source in copy[1].places.items():
            if Path(path).is_relative_to(copy[0] / name):
                return str(Path(source, Path(path).relative_to(copy[0] / name)))
    return path


def time_of(copy: Path) -> str:
    """Return the local time at which a copy was written, as 2026-11-22T02:30:00."""
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime((copy / SUMS).stat().st_mtime))


def _list_files(files: Files) -> bytes:
    """Return the list of files for SUMS. sha256sum ignores the lines of links, which are comments."""
    lines = (
        f"# {name} -> {content}\n" if isinstance(content, Path) else f"{hashlib.sha256(content).hexdigest()}  {name}\n"
        for name, content in sorted(files.items())
    )
    return "".join(lines).encode()
