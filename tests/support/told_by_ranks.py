"""What each rank of a command says of its own process, before its first step."""

import os
import subprocess
import sys
from pathlib import Path

CALLBACK = """

from pathlib import Path

from runner.training.callback import Callback


class Tell(Callback):
    def on_start(self, run):
        Path(f"told_{run.rank}").write_text(tell())  # lines of several ranks may mix on the terminal
"""


def ran(folder: Path, *words: str) -> str:
    """What a Python process says that ends well and without a complaint."""
    # As it is without a choice of the user's of glibc's, whoever runs the tests.
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    done = subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env=environ | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def told_by_ranks(folder: Path, tell: str, *launcher: str) -> list[str]:
    """tell: code with a function `tell()`, which returns the words."""
    (folder / "callbacks").mkdir()
    (folder / "callbacks" / "tell.yaml").write_text("# tells\ntell:\n  _target_: told.Tell\n")
    (folder / "told.py").write_text(tell + CALLBACK)
    words = ("--config-dir=.", "callbacks=tell", "model=mlp", "max_steps=1", "eval_batches=1", "logger=none", *launcher)
    ran(folder, "-m", "runner", *words)
    return [path.read_text() for path in sorted(folder.glob("told_*"))]
