"""A user's own folders, as --config-dir names them: where they stand on Hydra's search path and on Python's.

They are kept in the order in which they were typed, and of two that hold the same file the later one counts: an option
of one's own hides the built-in of its name, as a later override replaces an earlier one.
"""

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from runner import CONF

_searched: list[str] = []  # what Hydra's search path begins with, by hydra_plugins.runner.own_folders


def add_to_path(folders: Sequence[str]) -> None:
    """A user's own model lies beside its YAML file; behind everything else, so that it hides nothing."""
    sys.path.extend(folder for folder in reversed(folders) if folder not in sys.path)


@contextmanager
def searching(folders: Sequence[str]) -> Iterator[None]:
    """Hydra's search path, where one is made meanwhile, has these folders before the built-in one."""
    before = list(_searched)
    _searched[:] = reversed(folders)
    try:
        yield
    finally:
        _searched[:] = before


def searched() -> list[str]:
    """The folders to search before the built-in one, the first of them first."""
    return list(_searched)


def hiding(folders: Sequence[str], choices: Mapping[str, str | None]) -> str | None:
    """A line that names the chosen options of a user's own which hide a built-in one; None where none does.

    choices: the option taken of each group, or several of them as Hydra writes a list.
    """
    found: dict[str, list[str]] = {}
    for group, taken in choices.items():
        for option in _options(taken):
            file = Path(group.partition("@")[0], f"{option}.yaml")
            own = next((folder for folder in reversed(folders) if (Path(folder) / file).is_file()), None)
            if own and (CONF / file).is_file():
                found.setdefault(own, []).append(f"{group}={option}")
    if not found:
        return None
    told = (f"{' and '.join(words)} of {folder}" for folder, words in found.items())
    return f"own      {'; '.join(told)}, not the runner's option of that name"


def file_of(group: str, option: str) -> str | None:
    """The file of the option that is taken, None where there is none."""
    files = (Path(folder, group, f"{option}.yaml") for folder in (*_searched, str(CONF)))
    return next((str(file) for file in files if file.is_file()), None)


def absolute(folders: Iterable[str]) -> list[str]:
    """Each once, where it was last: a folder that is named again counts from there."""
    paths = [str(Path(folder).absolute()) for folder in folders]
    return [path for number, path in enumerate(paths) if path not in paths[number + 1 :]]


def _options(taken: object) -> list[str]:
    if taken is None:
        return []
    return [word.strip(" '\"").removesuffix(".yaml") for word in str(taken).strip("[]").split(",")]
