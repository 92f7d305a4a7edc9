"""Paths of the installed runner, and the names of the packages that it ships besides its own."""

from pathlib import Path

_HERE = Path(__file__).resolve().parent
_INSTALLED = _HERE / "_shipped"  # the location of `conf`, `models` and `data` in a wheel: see pyproject.toml
IS_CHECKOUT = not _INSTALLED.is_dir()
ROOT = _HERE.parent if IS_CHECKOUT else _INSTALLED
CONF = ROOT / "conf"
SHIPPED = ("models", "data")


def shipped_target(target: str) -> str:
    """Return the importable path of a dotted path such as `models.mlp.MLP`.

    A module of this name that the runner ships takes precedence over one on sys.path: people keep a `models/` or a
    `data.py` in their working directory. A path that the runner does not ship is returned unchanged.
    """
    package, _, rest = target.partition(".")
    module = rest.partition(".")[0]
    if package in SHIPPED and (ROOT / package / f"{module}.py").is_file():
        return f"runner.shipped.{target}"
    return target
