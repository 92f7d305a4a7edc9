"""Custom directories (`--config-dir`) on the search paths of Hydra and of Python.

They keep the order of the command line. If two of them contain the same file, the later directory wins, as a later
override does; an option of a custom directory hides the built-in option of its name.
"""

import importlib
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from runner.errors import is_user_code
from runner.paths import CONF

_searched: list[str] = []  # read by hydra_plugins.runner.search_path
_imported: dict[str, ModuleType] = {}  # the custom modules that calls from Python have imported


def add_to_path(directories: Sequence[str]) -> None:
    """Append the directories to sys.path, so that custom code is found and hides no installed module."""
    sys.path.extend(directory for directory in reversed(directories) if directory not in sys.path)


@contextmanager
def fresh_imports() -> Iterator[None]:
    """Restore sys.path on exit, and import custom modules again, as a new command would.

    The modules stay imported until the next call, because objects of their classes may still be in use.
    """
    for name in [name for name, module in _imported.items() if sys.modules.get(name) is module]:
        forget_module(name)
    _imported.clear()
    importlib.invalidate_caches()
    path, known = list(sys.path), set(sys.modules)
    try:
        yield
    finally:
        added = [Path(directory).resolve() for directory in sys.path if directory not in path]
        sys.path[:] = path
        for name, module in sys.modules.items():
            file = getattr(module, "__file__", None)
            if name in known or file is None or not is_user_code(file):
                continue
            if hasattr(module.__loader__, "recorded_source") or any(
                Path(file).resolve().is_relative_to(root) for root in added
            ):
                _imported[name] = module


def forget_module(name: str) -> ModuleType:
    """Remove a module from sys.modules and from its package, so that the next import executes it again. Return it."""
    parent, _, leaf = name.rpartition(".")
    if parent in sys.modules:
        vars(sys.modules[parent]).pop(leaf, None)
    return sys.modules.pop(name)


@contextmanager
def on_search_path(directories: Sequence[str]) -> Iterator[None]:
    """Put the directories before the built-in one on every Hydra search path that is created within the context."""
    before = list(_searched)
    _searched[:] = reversed(directories)
    try:
        yield
    finally:
        _searched[:] = before


def searched_dirs() -> list[str]:
    """Return the directories to search before the built-in one; the first has priority."""
    return list(_searched)


def describe_hidden(directories: Sequence[str], choices: Mapping[str, str | None]) -> str | None:
    """Return the header line that names the chosen custom options which hide a built-in one; None if none does."""
    hiding = []
    for group, chosen in choices.items():
        for option in str(chosen or "").strip("[]").split(","):  # several options are in brackets
            file = Path(group.partition("@")[0], f"{option.strip()}.yaml")
            custom = next((each for each in reversed(directories) if (Path(each) / file).is_file()), None)
            if custom and (CONF / file).is_file():
                hiding.append(f"{group}={option.strip()} from {custom}")
    return f"custom   {', '.join(hiding)} instead of the built-in option of that name" if hiding else None


def option_file(group: str, option: str) -> str | None:
    """Return the file that defines the option; None if none does."""
    files = (Path(directory, group, f"{option}.yaml") for directory in (*_searched, str(CONF)))
    return next((str(file) for file in files if file.is_file()), None)


def absolute_dirs(directories: Iterable[str]) -> list[str]:
    """Return absolute paths without duplicates; a repeated directory keeps its last position."""
    paths = [str(Path(directory).absolute()) for directory in directories]
    return [path for number, path in enumerate(paths) if path not in paths[number + 1 :]]
