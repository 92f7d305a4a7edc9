"""Imports what a dotted path names, and says which part of it cannot be found and where an import broke."""

import functools
import importlib
import pkgutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from runner import CLAIMED, files_of
from runner.config.diagnostics.own_line import deepest_line, first_line
from runner.errors import near_hint, nearest

EXTRAS = {"torchmetrics": "metrics"}  # what an extra of this project installs


def locate(target: str) -> Any:
    """What the dotted path names. Raises ValueError with one line that says which part cannot be had."""
    parts = target.split(".")
    if not all(part.isidentifier() for part in parts):
        raise ValueError("must be a dotted path, as package.module.Name")
    found = _import(parts[0], lambda: [module.name for module in pkgutil.iter_modules()])
    for index, part in enumerate(parts[1:], start=1):
        path = ".".join(parts[:index])
        if _has(found, part, path):
            found = getattr(found, part)
        elif hasattr(found, "__path__"):
            found = _import(".".join(parts[: index + 1]), functools.partial(_names, found), _hidden(found))
        else:
            raise ValueError(f"{path} has no {part}{_hidden(found) or near_hint(part, _names(found))}")
    return found


def locate_callable(target: str) -> Callable[..., Any]:
    """As `locate`, for a class or a function. Raises ValueError for anything else."""
    found: Callable[..., Any] = locate(target)
    if callable(found):
        return found
    inside = [name for name in _names(found) if callable(getattr(found, name, None))]
    near = nearest(target.rpartition(".")[2], inside)
    raise ValueError(
        f"is a {type(found).__name__}, not a class or a function" + (f"; did you mean {target}.{near}?" if near else "")
    )


def _has(holder: Any, name: str, path: str) -> bool:
    try:
        return hasattr(holder, name)
    except (Exception, SystemExit) as error:  # asking may import a module of the user's own: see runner._look_beside
        raise ValueError(_broken(path, error)) from error


def _hidden(module: Any) -> str:
    """The end of a message, where another file of the module's name is what the user may have meant."""
    if not isinstance(module, ModuleType) or not module.__file__ or module.__name__ in CLAIMED:
        return ""  # of the claimed ones the other files have been asked
    own = Path(module.__file__).resolve()
    others = [file for file in files_of(module.__name__) if Path(file) != own]
    return f"; {module.__name__} is {own}, not {others[0]}: give that another name" if others else ""


def _import(path: str, choices: Callable[[], list[str]], hint: str = "") -> Any:
    try:
        return importlib.import_module(path)
    except (Exception, SystemExit) as error:  # importing runs the user's code, which can fail in any way
        if not isinstance(error, ModuleNotFoundError) or error.name != path:
            raise ValueError(_broken(path, error)) from error
    parent, _, name = path.rpartition(".")
    if path in EXTRAS:
        raise ValueError(f"{path} is not installed; pip install 'experiment-runner[{EXTRAS[path]}]'")
    what = f"{parent} has no {name}" if parent else f"there is no module {name}"
    raise ValueError(what + (hint or near_hint(name, choices())))


def _broken(path: str, error: BaseException) -> str:
    """Names the deepest line of the user's own code: one inside a library would tell them little."""
    line = deepest_line(error)
    return f"importing {path} failed{f' at {line}' if line else ''}: {first_line(error)}"


def _names(holder: Any) -> list[str]:
    modules = [module.name for module in pkgutil.iter_modules(getattr(holder, "__path__", []))]
    return sorted({name for name in [*dir(holder), *modules] if not name.startswith("_")})
