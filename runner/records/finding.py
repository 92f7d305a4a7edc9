"""Runs and sweeps below a directory. No configuration is composed, and no recorded code is imported."""

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from runner.errors import InputError
from runner.records.ledger import LEDGER, is_sweep
from runner.records.run_files import read_mapping
from runner.records.run_record import RESULT
from runner.records.settings import OVERRIDES
from runner.records.start_time import in_order

CELLS = "cells"  # the directory of the runs of task=compare, in the directory of the task
MAX_LEVELS = 20  # of directories that are searched for runs


def check_is_record(path: Path, key: str) -> None:
    """Raise InputError, which names the key, if the path is not the directory of a run or sweep."""
    if (path / OVERRIDES).is_file() or is_sweep(path):
        return
    what = f"no sweep or run (it has neither {LEDGER} nor {OVERRIDES})" if path.is_dir() else "no directory"
    raise InputError(f"{key}={path} is {what}; name one under outputs/, or run=last")


def find_records(directory: Path | str, skipped: list[str] | None = None) -> Iterator[tuple[Path, bool]]:
    """Yield the path of each run and sweep at or below a directory, with True for a sweep. A sweep precedes its jobs.

    Links are not followed. Below a run, only the runs of task=compare are searched. A message about each directory that
    is not readable, or more than MAX_LEVELS levels below `directory`, is added to `skipped`.
    """
    stack, skipped = [(str(directory), 0)], [] if skipped is None else skipped
    while stack:
        path, level = stack.pop()
        try:
            with os.scandir(path) as found:
                entries = {entry.name: entry for entry in found}
        except OSError as error:
            if not isinstance(error, FileNotFoundError):  # not one that was removed meanwhile
                skipped.append(f"{path} is skipped: {error.strerror}")
            continue
        is_run = OVERRIDES in entries
        if is_run or LEDGER in entries:
            yield Path(path), LEDGER in entries
        searched = entries.values() if not is_run else [entries[CELLS]] if CELLS in entries else []
        below = [(entry.path, level + 1) for entry in searched if entry.is_dir(follow_symlinks=False)]
        if below and level == MAX_LEVELS:
            skipped.append(f"{path} is skipped: it has more than {MAX_LEVELS} parent directories in {directory}")
        else:
            stack += reversed(below)


def newest_record(parents: Iterable[Path], files: Sequence[str] = (LEDGER, OVERRIDES)) -> Path | None:
    """Return the newest subdirectory of `parents` that contains one of `files`, by default a sweep or a run."""
    found = {path.parent for parent in parents for name in files for path in parent.glob(f"*/{name}")}
    return in_order(found)[-1] if found else None


def newest_training_run(parents: Iterable[Path]) -> Path | None:
    """Return the newest run with task=train in the subdirectories of `parents`.

    Raises InputError if the task of a newer run cannot be read, because it may be the newest training run.
    """
    for path in reversed(in_order(path.parent for parent in parents for path in parent.glob(f"*/{OVERRIDES}"))):
        if (path / RESULT).exists() and read_mapping(path / RESULT).get("task") == "train":
            return path
    return None
