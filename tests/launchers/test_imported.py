"""What is imported is not gone through by the garbage collector, which works in training; a caller's is left alone."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TOLD = """\
import gc
from pathlib import Path

from runner.training.callback import Callback


class Tell(Callback):
    def on_start(self, run):
        told = f"{gc.isenabled()} {gc.get_freeze_count() > 100_000}"
        Path(f"told_{run.rank}").write_text(told)  # lines of several ranks may mix on the terminal
"""


def ran(folder: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        [sys.executable, *words], cwd=folder, env=environ, capture_output=True, text=True, timeout=300
    )


@pytest.mark.parametrize(
    ("launcher", "num_ranks"),
    [(("launcher=env",), 1), pytest.param(("launcher=spawn", "parallel=ddp"), 2, marks=pytest.mark.thorough)],
)
def test_a_rank_collects_its_own_garbage_alone(launcher: tuple[str, ...], num_ranks: int, tmp_path: Path) -> None:
    (tmp_path / "callbacks").mkdir()
    (tmp_path / "callbacks" / "tell.yaml").write_text("# tells\ntell:\n  _target_: told.Tell\n")
    (tmp_path / "told.py").write_text(TOLD)
    words = ("--config-dir=.", "callbacks=tell", "model=mlp", "max_steps=1", "eval_batches=1", "logger=none", *launcher)
    done = ran(tmp_path, "-m", "runner", *words)
    assert done.returncode == 0, done.stderr
    assert [path.read_text() for path in tmp_path.glob("told_*")] == ["True True"] * num_ranks
    assert done.stderr == "", "nor does anything complain at the exit that it has not been cleared away"


def test_a_callers_collector_is_left_alone(tmp_path: Path) -> None:
    code = """\
import gc
from runner.launchers.imported import begin_imports, end_imports
end_imports()
assert gc.isenabled() and not gc.get_freeze_count()
begin_imports()
assert not gc.isenabled()
end_imports()
assert gc.isenabled() and gc.get_freeze_count()
"""
    done = ran(tmp_path, "-c", code)
    assert done.returncode == 0, done.stderr
