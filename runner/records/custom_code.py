"""The custom modules of a run: the modules that its configuration names, and the custom modules that these import.

The run has a copy of them (runner.records.code_copy). `code` in its result.json lists the modules with their original
files, and the paths of their copies.
"""

import ast
import hashlib
import importlib.util
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import runner
from runner.errors import InputError, is_user_code
from runner.paths import ROOT
from runner.records.code_copy import (
    CODE,
    Files,
    find_copies,
    hash_of,
    original_path,
    read_copy,
    running_copy,
    write_copy,
)
from runner.records.run_files import read_bytes, regular
from runner.records.run_record import find_run

# Groups and keys whose code determines the results of a run.
DECISIVE = ("model", "data", "transforms", "transform_targets", "loss", "objective", "loader", "optimizer", "scheduler")


@dataclass(frozen=True)
class CustomModule:
    """A custom module."""

    file: str  # the absolute path of the original file
    copy: str  # the path of its copy in the copy of the code, such as nets/blocks.py or own/0-mine/nets/blocks.py
    decisive: bool  # a group or key in DECISIVE names the module, or names one that imports it

    @property
    def is_package(self) -> bool:
        return self.copy.endswith("/__init__.py")


@dataclass(frozen=True)
class CustomCode:
    """Custom modules by name, with their sources: imported by this process, or the copy that a run has recorded."""

    modules: Mapping[str, CustomModule]
    sources: Mapping[str, bytes]
    copy: str | None = None  # the name of the existing copy from which the modules were read or imported
    directory: Path = Path()  # the existing copy that was read

    @property
    def hash(self) -> str | None:
        """The hash of the names and sources of the modules; None without modules."""
        return hash_of(self._files) if self.modules else None

    @property
    def hashes(self) -> dict[str, str]:
        """The SHA-256 of the source of each module, by name."""
        return {name: hashlib.sha256(source).hexdigest() for name, source in self.sources.items()}

    @property
    def _files(self) -> Files:
        return {_module_path(name, module.is_package): self.sources[name] for name, module in self.modules.items()}

    @property
    def record(self) -> dict[str, Any]:
        """The values for result.json, with which `read_code` finds the copies of the modules."""
        modules = {name: asdict(module) for name, module in self.modules.items()}
        return {"hash": self.hash, "copy": self.copy or self.hash, "modules": modules}

    @property
    def directories(self) -> list[Path]:
        """The directories of the original files."""
        return list(dict.fromkeys(Path(module.file).parent for module in self.modules.values()))

    def current_file(self, name: str) -> Path:
        """Return the imported file of the module, or else its original file; if that is missing, a file on sys.path."""
        module = self.modules[name]
        path = _module_path(name, module.is_package)
        imported = getattr(sys.modules.get(name), "__file__", None)
        paths = [Path(imported or module.file), *(Path(entry or os.curdir, path) for entry in sys.path)]
        return next((path for path in paths if path.is_file()), Path(module.file)).absolute()

    def changed(self) -> list[str]:
        """Return the names of the modules whose current file is missing or differs from the copy."""
        return [name for name in self.modules if _read(self.current_file(name)) != self.sources[name]]

    def describe(self, names: Iterable[str]) -> str:
        """Return the current files of the modules, for a message; a file that does not exist is marked."""
        files = [self.current_file(name) for name in names]
        return ", ".join(f"{file}{'' if file.is_file() else ' (missing)'}" for file in files)

    def write(self, run: Path) -> None:
        """Copy the modules to the directory of the run, or of its sweep, unless the copy exists."""
        if self.modules and self.copy is None:
            write_copy(run, self._files)


def imported_code(config: Mapping[str, Any]) -> CustomCode:
    """Return the custom modules of the classes and functions that the configuration names."""
    sources = _closure(targets(config))
    decisive = _closure(targets({key: config.get(key) for key in DECISIVE}))
    files = {name: Path(str(custom_file(name))) for name in sorted(sources)}
    directory = _imported_copy(files, sources)
    modules = {}
    for name, file in files.items():
        path = _module_path(name, _is_package(name)) if directory is None else str(file.relative_to(directory))
        modules[name] = CustomModule(original_path(str(file)), path, name in decisive)
    return CustomCode(modules, sources, None if directory is None else directory.name)


def _imported_copy(files: Mapping[str, Path], sources: Mapping[str, bytes]) -> Path | None:
    """Return the running copy if it contains these modules and their sources; None otherwise."""
    copy = running_copy()
    if copy is None or not files:
        return None
    is_complete = all(file.is_relative_to(copy[0]) and _read(file) == sources[name] for name, file in files.items())
    return copy[0] if is_complete else None


def find_code(run: Path, fix: str = "add code=current") -> Path | None:
    """Return the copy of a run's custom modules, or None if it has none. Raise InputError if the copy is missing."""
    name = (find_run(run).code or {}).get("copy")
    if not isinstance(name, str):
        return None
    path = next((path for path in find_copies(run) if path.name == name), None)
    if path is None:
        raise InputError(f"{run / CODE / name}: the copy of the run's code is missing; restore it, or {fix}")
    return path


def read_code(run: Path, fix: str = "add code=current") -> CustomCode | None:
    """Return the custom modules in `find_code`, or None. Raise InputError as `find_code`, and for a damaged copy."""
    path = find_code(run, fix)
    if path is None:
        return None
    try:
        listed = (find_run(run).code or {})["modules"]
        modules = {str(name): CustomModule(**facts) for name, facts in listed.items()}
        found = read_copy(path, [module.copy for module in modules.values()])
    except (AttributeError, KeyError, OSError, TypeError, ValueError) as error:
        raise InputError(f"{path}: the copy of the run's code is damaged ({error}); restore it, or {fix}") from None
    return CustomCode(modules, {name: found[module.copy] for name, module in modules.items()}, path.name, path)


def targets(node: Any) -> Iterator[str]:
    """Yield the dotted paths of the classes and functions that a part of a configuration names."""
    if isinstance(node, Mapping):
        for key, value in node.items():
            if str(key).endswith("_target_"):
                yield str(value)
            else:
                yield from targets(value)
    elif isinstance(node, (list, tuple)):
        for item in node:
            yield from targets(item)


def custom_file(name: str) -> Path | None:
    """Return the file of an imported module; None for a module of Python, an installed package or the runner."""
    file = getattr(sys.modules.get(name), "__file__", None)
    if not isinstance(file, str) or name in ("__main__", "__mp_main__") or not is_user_code(file):
        return None
    path = Path(file).absolute()
    return None if any(path.is_relative_to(source) for source in runner_sources().values()) else path


def runner_sources() -> dict[str, Path]:
    """Return the directories of the runner's packages and of the shipped configuration, models and data, by name."""
    package = Path(runner.__file__).resolve().parent
    sources = {"runner": package, "hydra_plugins/runner": package.parent / "hydra_plugins" / "runner"}
    return sources | {name: ROOT / name for name in ("conf", "models", "data")}


def shipped_hash() -> str:
    """Return a hash of the sources of the runner, and of the shipped models and data."""
    found = hashlib.sha256()
    for name, directory in sorted(runner_sources().items()):
        for path in sorted(directory.rglob("*.py")) if name != "conf" else []:
            found.update(f"{name}/{path.relative_to(directory)}".encode() + path.read_bytes())
    return found.hexdigest()[:12]


def _closure(names: Iterable[str]) -> dict[str, bytes]:
    """Return the custom modules of the dotted paths, and those that they import directly or indirectly: their sources.

    A module whose source cannot be read is left out, with what only it imports.
    """
    found: dict[str, bytes] = {}
    pending = list(names)
    while pending:
        parts = pending.pop().split(".")
        for size in range(1, len(parts) + 1):  # a package is imported before its modules
            name = ".".join(parts[:size])
            file = custom_file(name) if name not in found else None
            if file is not None and (source := _source(name, file)) is not None:
                found[name] = source
                pending += _imports(name, source)
    return found


def _imports(name: str, source: bytes) -> Iterator[str]:
    """Yield the dotted paths in the import statements of a module, including those inside functions."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):  # the file was changed after its import
        return
    package = name if _is_package(name) else name.rpartition(".")[0]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                try:
                    base = importlib.util.resolve_name("." * node.level + base, package)
                except ImportError:  # beyond the top-level package; the module handles the error itself
                    continue
            yield from (f"{base}.{alias.name}" for alias in node.names)


def _module_path(name: str, is_package: bool) -> str:
    return name.replace(".", "/") + ("/__init__.py" if is_package else ".py")


def _is_package(name: str) -> bool:
    return hasattr(sys.modules[name], "__path__")


def _source(name: str, file: Path) -> bytes | None:
    """Return the source of an imported module; None if its file is not Python source or no longer exists."""
    recorded_source = getattr(getattr(sys.modules[name], "__loader__", None), "recorded_source", None)
    if recorded_source is not None:  # imported from the copy of another run
        return bytes(recorded_source(name))
    return _read(file) if file.suffix == ".py" else None


def _read(file: Path) -> bytes | None:
    """Return the content of a regular file; None if it cannot be read. The record of another user may name the file."""
    try:
        return read_bytes(file, opener=regular)  # users may link their modules
    except (OSError, ValueError):
        return None
