"""What is on disk. The package can be called: `runner.runs("outputs")` lists the runs there, by runner/api/past.py."""

import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from runner.api.past import Run


class _Callable(ModuleType):
    """Python binds the name `runs` in `runner` to this package, as soon as anything of it is imported."""

    def __call__(self, folder: "str | Path" = "outputs") -> "list[Run]":
        """All runs beneath a folder, the jobs of sweeps among them, in the order in which they were started."""
        list_runs: Callable[[str | Path], list[Run]] = import_module("runner.api.past").runs
        return list_runs(folder)


sys.modules[__name__].__class__ = _Callable
