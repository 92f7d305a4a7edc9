"""A configuration-driven experiment runner for PyTorch: `python -m runner model=convnet parallel=ddp`.

Importing it binds the names `models` and `data` to this installation, whatever the working directory holds. What they
lack is looked for in modules of the same name elsewhere on sys.path, such as a user's own `models.py`.

For scripts and notebooks it has what `__all__` names (docs/python.md): `runner.train(["model=mlp"])`.
"""

import importlib
import importlib.util
import sys
from collections.abc import Collection, Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, overload

if TYPE_CHECKING:
    from runner.api.experiments import compose, sweep, train
    from runner.api.past import Run, open_run, runs, table
    from runner.config.schema import Config
    from runner.errors import InputError, JobFailed, Preempted

__all__ = [
    "Config",
    "InputError",
    "JobFailed",
    "Preempted",
    "Run",
    "compose",
    "open_run",
    "runs",
    "sweep",
    "table",
    "train",
]

__version__ = "0.1.0"

_HERE = Path(__file__).resolve().parent
_SHIPPED = _HERE / "_shipped"  # where an installed runner has what lies beside it in a checkout: see pyproject.toml
ROOT = _SHIPPED if _SHIPPED.is_dir() else _HERE.parent
CONF = ROOT / "conf"
CLAIMED = ("models", "data")

_OFFERED = {
    **dict.fromkeys(("compose", "sweep", "train"), "runner.api.experiments"),
    **dict.fromkeys(("Run", "open_run", "table"), "runner.api.past"),
    **dict.fromkeys(("InputError", "JobFailed", "Preempted"), "runner.errors"),
    "Config": "runner.config.schema",
}
_others: dict[str, ModuleType] = {}  # modules of a claimed name that are not ours, by file


class _SharedPath(Sequence[str]):
    """Where submodules of a claimed package are: in ours, then in folders of its name on sys.path as it is by then."""

    def __init__(self, name: str):
        self._name = name

    def _folders(self) -> list[str]:
        own = str(ROOT / self._name)
        named = (str(Path(entry, self._name).absolute()) for entry in sys.path)
        return [own, *dict.fromkeys(folder for folder in named if folder != own)]

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        return self._folders()[index]

    def __len__(self) -> int:
        return len(self._folders())


def files_of(name: str) -> list[str]:
    """The files that could be imported by this dotted name, were they not behind another one on sys.path."""
    parent, _, leaf = name.replace(".", "/").rpartition("/")
    specs = [PathFinder.find_spec(leaf, [str(Path(entry, parent))]) for entry in sys.path]
    return list(dict.fromkeys(str(Path(spec.origin).resolve()) for spec in specs if spec and spec.origin))


def _claim(name: str) -> None:
    """Bind the top-level name to this installation's package.

    `python -m` puts the working directory first on sys.path, and people keep a `models/` or a `data.py` there. The
    configuration means ours when it says `models.convnet.ConvNet`.
    """
    if name in sys.modules:
        return
    spec = importlib.util.spec_from_file_location(
        name, ROOT / name / "__init__.py", submodule_search_locations=[str(ROOT / name)]
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    shared: Any = module  # PEP 562: these two are asked where the package itself has no such name
    shared.__path__ = _SharedPath(name)
    shared.__getattr__ = lambda wanted: _look_beside(module, wanted)
    shared.__dir__ = lambda: sorted({*vars(module), *(word for other in _beside(module) for word in vars(other))})


def _look_beside(module: ModuleType, wanted: str) -> Any:
    is_submodule = PathFinder.find_spec(f"{module.__name__}.{wanted}", module.__path__) is not None
    for other in () if wanted.startswith("__") or is_submodule else _beside(module):
        if hasattr(other, wanted):
            return getattr(other, wanted)
    raise AttributeError(f"module {module.__name__!r} has no attribute {wanted!r}")


def _beside(module: ModuleType) -> list[ModuleType]:
    """The other modules of its name, imported. Raises what importing one raises."""
    found = []
    for file in files_of(module.__name__):
        if Path(file) == ROOT / module.__name__ / "__init__.py":
            continue
        if file not in _others:
            spec = importlib.util.spec_from_file_location(module.__name__, file)
            assert spec is not None and spec.loader is not None
            _others[file] = importlib.util.module_from_spec(spec)
            try:
                spec.loader.exec_module(_others[file])
            except BaseException:
                del _others[file]
                raise
        found.append(_others[file])
    return found


def forget_beside(folders: Collection[Path]) -> None:
    """Other modules of a claimed name that lie in these folders are read again when they are asked for."""
    for file in [file for file in _others if {Path(file).parent, Path(file).parent.parent} & set(folders)]:
        del _others[file]


def __getattr__(name: str) -> Any:
    """PEP 562: what is for scripts and notebooks is imported when it is used, and torch with it."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "runs":
        return importlib.import_module("runner.runs")  # which can be called
    globals()[name] = found = getattr(importlib.import_module(_OFFERED[name]), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


for _name in CLAIMED:
    _claim(_name)
