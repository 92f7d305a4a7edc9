"""The rule of trust: a run directory of another user is data. Its overrides and its code are used with `trust=true`."""

import os
import pwd
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from runner.errors import InputError
from runner.records.code_copy import find_copies
from runner.records.custom_code import targets
from runner.records.ledger import LEDGER
from runner.records.run_files import read_mapping
from runner.records.run_record import RESULT
from runner.records.settings import CONFIG, OVERRIDES

# Packages whose classes need no review.
_KNOWN = ("runner.", "hydra_plugins.runner.", "models.", "data.", "torch.", "torchvision.")
_MAX_LISTED = 4


def check_trusted(named: str, directory: Path, words: Sequence[str], trust: Any) -> None:
    """Raise InputError if another user owns the directory of a run or a sweep, or a file that would be used from it.

    `named` is how the command names the directory, as run=DIR; `words` are the recorded command-line arguments. With
    `trust=True`, do nothing.
    """
    user = None if trust is True else _other_owner(directory)
    if user is None:
        return
    code = list(_recorded_code(directory, words))
    more = f" and {len(code) - _MAX_LISTED} more" if len(code) > _MAX_LISTED else ""
    listed = ", ".join(code[:_MAX_LISTED]) + more if code else "no custom code, but with the options of its record"
    raise InputError(
        f"{named} belongs to {user} and would run {listed}; review that, and if you trust it, add trust=true"
    )


def _other_owner(directory: Path) -> str | None:
    """Return the first other user who owns the directory or a file that would be used from it; None if none does."""
    for path in _used_files(directory):
        try:
            uid = os.stat(path).st_uid
        except OSError:  # most runs have only some of the files
            continue
        if uid != os.geteuid():
            try:
                return f"{pwd.getpwuid(uid).pw_name} (uid {uid})"
            except KeyError:
                return f"uid {uid}"
    return None


def _used_files(directory: Path) -> Iterator[Path]:
    yield directory
    yield from (directory / name for name in (OVERRIDES, CONFIG, RESULT, LEDGER))
    for copy in find_copies(directory):
        yield from (copy, *copy.rglob("*"))


def _recorded_code(directory: Path, words: Sequence[str]) -> Iterator[str]:
    """Yield the code that the record names: custom directories, classes and functions, and copies of code."""
    yield from (word for word in words if word.startswith("--config-dir=") or "_target_" in word)
    yield from map(str, find_copies(directory))
    if (directory / CONFIG).is_file():
        found = dict.fromkeys(targets(read_mapping(directory / CONFIG)))
        yield from (f"_target_: {target}" for target in found if not target.startswith(_KNOWN))
