"""Imports of custom modules from the copy that a run has recorded, instead of from their current files."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType

from runner.config.custom_dirs import forget_module
from runner.errors import InputError
from runner.records.custom_code import CustomCode, find_code, read_code

RECORDED, CURRENT = "recorded", "current"  # the values of code=


class RecordedModules(MetaPathFinder, Loader):
    """An importer of recorded modules from their copies. `__file__` is the current file: data may be next to it."""

    def __init__(self, code: CustomCode):
        self.code = code

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: object = None) -> ModuleSpec | None:
        modules = self.code.modules
        if name in modules:
            file = self.code.current_file(name)
            is_package = modules[name].is_package
            search = [str(file.parent)] if is_package else None
            return spec_from_file_location(name, file, loader=self, submodule_search_locations=search)
        if any(each.startswith(f"{name}.") for each in modules) and PathFinder.find_spec(name, path) is None:
            return ModuleSpec(name, None, is_package=True)  # a namespace package whose directory has been removed
        return None

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        # Tracebacks name the copy, because the current file may have changed.
        file = self.code.directory / self.code.modules[name].copy
        exec(compile(self.recorded_source(name), str(file), "exec"), vars(module))

    def recorded_source(self, name: str) -> bytes:
        return self.code.sources[name]


@contextmanager
def importing_code_of(run: str | Path | None) -> Iterator[None]:
    """Import custom modules from the copy that a run has recorded; from the current files if `run` is None.

    Modules of the same names that were imported before are restored on exit. Raise InputError if the copy is missing
    or damaged.
    """
    code = None if run is None or _active(Path(run)) else read_code(Path(run))
    if code is None:
        yield
        return
    finder = RecordedModules(code)
    replaced = {name: forget_module(name) for name in code.modules if name in sys.modules}
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name, module in replaced.items():
            sys.modules[name] = module
            parent, _, leaf = name.rpartition(".")
            if parent in sys.modules:
                setattr(sys.modules[parent], leaf, module)


def _active(run: Path) -> CustomCode | None:
    """Return the copy that the run has recorded, if its modules are imported from it now."""
    directory = find_code(run)
    finders = [each for each in sys.meta_path if isinstance(each, RecordedModules)]
    return next((finder.code for finder in finders if finder.code.directory == directory), None)


def describe_code(run: Path, uses_copy: bool) -> str | None:
    """Return a header line that reports a missing copy, or the current files that differ from the copy; else None."""
    try:
        code = _active(run) if uses_copy else read_code(run, "continue without it")
    except InputError as error:
        return f"code     current; {error}"
    if code is None or not (changed := code.changed()):
        return None
    files = code.describe(changed)
    if uses_copy:
        return f"code     as recorded in {code.directory}; the current code differs: {files}"
    return f"code     current, which differs from {code.directory}: {files}"
