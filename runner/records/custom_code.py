"""The custom modules of a run: the modules that its configuration names, and the custom modules that these import.

The run directory contains a copy of them in `code/HASH/`; the jobs of a sweep share a copy in the sweep's directory.
HASH is the start of the SHA-256 of the files and their paths. `code.json` lists the modules and their original files.
"""

import ast
import hashlib
import importlib.util
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import runner
from runner.errors import InputError, is_user_code
from runner.paths import ROOT
from runner.records.ledger import is_sweep
from runner.records.provenance import STATE, original_path
from runner.records.run_files import dumps, make_directory, read_bytes, read_mapping, regular
from runner.records.run_record import find_run

CODE = "code"
_HASH = re.compile(r"[0-9a-f]{12}")
# Groups and keys whose code determines the results of a run.
DECISIVE = ("model", "data", "transforms", "transform_targets", "loss", "objective", "loader", "optimizer", "scheduler")


@dataclass(frozen=True)
class CustomModule:
    """A custom module."""

    file: str  # the absolute path of the original file
    copy: str  # the path of the copy, relative to the directory of the record, such as nets/blocks.py
    decisive: bool  # a group or key in DECISIVE names the module, or names one that imports it


@dataclass(frozen=True)
class CustomCode:
    """Custom modules by name, with their sources: imported by this process, or the copy that a run has recorded."""

    modules: Mapping[str, CustomModule]
    sources: Mapping[str, bytes]
    directory: Path = Path()  # of the copy

    @property
    def hash(self) -> str | None:
        """The start of the SHA-256 of the modules, which names the directory of their copy; None without modules."""
        total = hashlib.sha256()
        for name in sorted(self.modules):
            module, source = self.modules[name], self.sources[name]
            total.update(f"{module.copy} {module.decisive} {len(source)}\n".encode() + source)
        return total.hexdigest()[:12] if self.modules else None

    @property
    def directories(self) -> list[Path]:
        """The directories of the original files."""
        return list(dict.fromkeys(Path(module.file).parent for module in self.modules.values()))

    def current_file(self, name: str) -> Path:
        """Return the imported file of the module, or else its original file; if that is missing, a file on sys.path."""
        module = self.modules[name]
        imported = getattr(sys.modules.get(name), "__file__", None)
        paths = [Path(imported or module.file), *(Path(entry or os.curdir, module.copy) for entry in sys.path)]
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
        if (name := self.hash) is None:
            return
        parent = (run.parent if is_sweep(run.parent) else run) / CODE
        make_directory(parent)
        if (parent / name).exists():
            return
        partial = Path(tempfile.mkdtemp(prefix="partial-", dir=parent))
        try:
            for each, module in self.modules.items():
                (partial / module.copy).parent.mkdir(parents=True, exist_ok=True)
                (partial / module.copy).write_bytes(self.sources[each])
            listed = {each: asdict(module) for each, module in self.modules.items()}
            (partial / STATE).write_text(dumps({"modules": listed}, indent=1))
            partial.chmod(0o755)
            try:
                partial.rename(parent / name)
            except OSError:
                if not (parent / name).exists():  # otherwise another job of the sweep has written the copy
                    raise
        finally:
            shutil.rmtree(partial, ignore_errors=True)


def imported_code(config: Mapping[str, Any]) -> CustomCode:
    """Return the custom modules of the classes and functions that the configuration names."""
    sources = _closure(targets(config))
    decisive = _closure(targets({key: config.get(key) for key in DECISIVE}))
    modules = {}
    for name in sorted(sources):
        copy = name.replace(".", "/") + ("/__init__.py" if _is_package(name) else ".py")
        modules[name] = CustomModule(original_path(str(custom_file(name))), copy, name in decisive)
    return CustomCode(modules, sources)


def find_code(run: Path, fix: str = "add code=current") -> Path | None:
    """Return the directory with the copy of a run's custom modules, or None. Raise InputError if it is missing."""
    name = find_run(run).code_hash
    if not name:
        return None
    candidates = [parent / CODE / name for parent in (run, run.parent) if _HASH.fullmatch(name)]
    directory = next((path for path in candidates if (path / STATE).is_file()), None)
    if directory is None:
        raise InputError(f"{run / CODE / name}: the copy of the run's code is missing; restore it, or {fix}")
    return directory


def read_code(run: Path, fix: str = "add code=current") -> CustomCode | None:
    """Return the copy in `find_code`, or None. Raise InputError as `find_code`, and for a damaged or changed copy."""
    directory = find_code(run, fix)
    if directory is None:
        return None
    try:
        listed = read_mapping(directory / STATE)["modules"]
        modules = {str(name): CustomModule(**facts) for name, facts in listed.items()}
        sources = {}
        for name, module in modules.items():
            if not (directory / module.copy).resolve().is_relative_to(directory.resolve()):
                raise ValueError(module.copy)
            sources[name] = read_bytes(directory / module.copy)
    except (AttributeError, KeyError, OSError, TypeError, ValueError) as error:
        raise InputError(
            f"{directory}: the copy of the run's code is damaged ({error}); restore it, or {fix}"
        ) from None
    code = CustomCode(modules, sources, directory)
    if code.hash != directory.name:
        raise InputError(f"{directory}: the copy of the run's code has changed; restore it, or {fix}")
    return code


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
