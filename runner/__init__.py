"""A configuration-driven experiment runner for PyTorch: `python -m runner model=convnet parallel=ddp`.

Importing it binds the names `models` and `data` to this installation, whatever the working directory holds.
"""

import importlib.util
import sys
from pathlib import Path

__version__ = "0.1.0"

ROOT = Path(__file__).resolve().parent.parent
CONF = ROOT / "conf"


def _claim(name: str) -> None:
    """Bind the top-level name to this installation's package.

    `python -m` puts the working directory first on sys.path, and people keep a `models/` or a `data.py` there. The
    configuration means ours when it says `models.convnet.ConvNet`.
    """
    if name in sys.modules:
        return
    folder = ROOT / name
    spec = importlib.util.spec_from_file_location(
        name, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)


for _name in ("models", "data"):
    _claim(_name)
