"""A user's own folders, as --config-dir names them: where they stand on Hydra's search path and on Python's.

They are kept in the order in which they were typed, and of two that hold the same file the later one counts: an option
of one's own hides the built-in of its name, as a later override replaces an earlier one.
"""

import importlib
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from runner import CONF, forget_beside

_searched: list[str] = []  # what Hydra's search path begins with, by hydra_plugins.runner.own_folders
_imported: dict[str, ModuleType] = {}  # what calls of Python have imported from folders that they put on sys.path


def add_to_path(folders: Sequence[str]) -> None:
    """A user's own model lies beside its YAML file; behind everything else, so that it hides nothing."""
    sys.path.extend(folder for folder in reversed(folders) if folder not in sys.path)


@contextmanager
def importing_anew() -> Iterator[None]:
    """What is put on sys.path meanwhile leaves it again, and modules are read from there as a new command reads them.

    They stay imported until the next time, for the sake of what was made of them.
    """
    for name in [name for name, module in _imported.items() if sys.modules.get(name) is module]:
        parent, _, leaf = name.rpartition(".")
        if parent in sys.modules:
            vars(sys.modules[parent]).pop(leaf, None)
        del sys.modules[name]
    _imported.clear()
    importlib.invalidate_caches()
    path, known = list(sys.path), set(sys.modules)
    try:
        yield
    finally:
        added = {Path(folder).resolve() for folder in sys.path if folder not in path}
        sys.path[:] = path
        new = {name: module for name, module in sys.modules.items() if name not in known}
        _imported.update({name: module for name, module in new.items() if _root(name, module) in added})
        forget_beside(added)


def _root(name: str, module: ModuleType) -> Path | None:
    """The folder of sys.path that the module was found in."""
    file = getattr(module, "__file__", None)
    if file is None:
        return None
    path = Path(file).resolve()
    depth = name.count(".") + (path.stem == "__init__")
    return path.parents[depth] if depth < len(path.parents) else None


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
