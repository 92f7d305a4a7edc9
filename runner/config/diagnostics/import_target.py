"""Import of the object of a dotted path, with an explanation of the part that is missing or fails to import."""

import functools
import importlib
import pkgutil
import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from runner.errors import InputError, failed_with, first_line, near_hint
from runner.paths import ROOT, SHIPPED, shipped_target

EXTRAS = {"torchmetrics": "metrics", "timm": "timm"}  # packages that an extra of this project installs


def import_torch() -> None:
    """Import torch, before the constructors that fail without it. Raise InputError if it cannot be loaded."""
    try:
        importlib.import_module("torch")
    except (ImportError, MemoryError, OSError) as error:
        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
        hint = f"; `ulimit -v` limits this process to {limit >> 10:,} KiB, raise it" if limit >= 0 else ""
        raise InputError(f"torch cannot be imported ({first_line(error)}){hint}") from None


def locate(target: str) -> Any:
    """Return the object of the dotted path. Raise ValueError, one line that names the missing part."""
    parts = target.split(".")
    if not all(part.isidentifier() for part in parts):
        raise ValueError("must be a dotted path, as package.module.Name")
    if shipped_target(target) != target or (parts[0] in SHIPPED and not _is_custom(parts)):
        found = importlib.import_module(f"runner.shipped.{parts[0]}")
    elif parts[0] in SHIPPED:
        with _without_checkout(parts[0]):
            found = _import(parts[0], list)
    else:
        found = _import(parts[0], lambda: [module.name for module in pkgutil.iter_modules()])
    for index, part in enumerate(parts[1:], start=1):
        path = ".".join(parts[:index])
        if hasattr(found, part):
            found = getattr(found, part)
        elif hasattr(found, "__path__"):
            found = _import(f"{found.__name__}.{part}", functools.partial(_names, found), _hidden(found))
        else:
            raise ValueError(f"{path} has no {part}{_hidden(found) or near_hint(part, _names(found))}")
    return found


def locate_callable(target: str) -> Callable[..., Any]:
    """Return the class or function of the dotted path. Raise ValueError as `locate`, and for another object."""
    found: Callable[..., Any] = locate(target)
    if not callable(found):
        raise ValueError(f"is a {type(found).__name__}, not a class or a function")
    return found


def _hidden(module: Any) -> str:
    """Return the end of a message if another file of the same module name may be the intended one."""
    if not isinstance(module, ModuleType) or not module.__file__:
        return ""
    name, found = module.__name__.removeprefix("runner.shipped."), Path(module.__file__).resolve()
    others = [file for file in _files_of(name) if Path(file) != found and not Path(file).is_relative_to(ROOT / name)]
    return f"; {name} is {found}, not {others[0]}: give that another name" if others else ""


def _import(path: str, choices: Callable[[], list[str]], hint: str = "") -> Any:
    try:
        return importlib.import_module(path)
    except (Exception, SystemExit) as error:  # custom code can fail in any way
        if not isinstance(error, ModuleNotFoundError) or error.name != path:
            raise ValueError(f"importing {path} failed{failed_with(error)}") from error
    if path in EXTRAS:
        raise ValueError(f"{path} is not installed; pip install 'experiment-runner[{EXTRAS[path]}]'")
    parent, _, name = path.removeprefix("runner.shipped.").rpartition(".")
    what = f"{parent} has no {name}" if parent else f"there is no module {name}"
    raise ValueError(what + (hint or near_hint(name, choices())))


@contextmanager
def _without_checkout(package: str) -> Iterator[None]:
    """Import a custom module named as a shipped package, even if the working directory is a checkout of the runner."""
    path, file = list(sys.path), getattr(sys.modules.get(package), "__file__", None)
    if file and Path(file).resolve().is_relative_to(ROOT / package):
        del sys.modules[package]
    sys.path[:] = [entry for entry in path if Path(entry).resolve() != ROOT]
    try:
        yield
    finally:
        sys.path[:] = path


def _is_custom(parts: list[str]) -> bool:
    """Return True if a module of the user has the name of a package that the runner ships."""
    files = (*_files_of(parts[0]), *_files_of(".".join(parts[:2])))
    return any(not Path(file).is_relative_to(ROOT / parts[0]) for file in files)


def _files_of(name: str) -> list[str]:
    """Return the files on sys.path that define the module; Python imports the first of them."""
    parent, _, leaf = name.replace(".", "/").rpartition("/")
    specs = [PathFinder.find_spec(leaf, [str(Path(entry, parent))]) for entry in sys.path]
    return list(dict.fromkeys(str(Path(spec.origin).resolve()) for spec in specs if spec and spec.origin))


def _names(parent: Any) -> list[str]:
    modules = [module.name for module in pkgutil.iter_modules(getattr(parent, "__path__", []))]
    return sorted({name for name in [*dir(parent), *modules] if not name.startswith("_")})
