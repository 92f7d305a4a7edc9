"""kill -9 before every kind of file operation of saving and deleting, also in a resumed run: a checkpoint remains."""

import os
import re
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fault_rig import OVERRIDES, all_sound, assert_same, before_each_step, cut
from ranks import RankError
from worlds import Run, run

from runner.checkpoints.layout import list_checkpoints
from runner.training.trainer import Trainer

# Audit events of Python, which precede the operation, and a pattern of its first path.
OPERATIONS = {
    "create": ("os.mkdir", r"step_\d+\.tmp$"),
    "write the tensors": ("open", r"\.tmp/rank_0\.safetensors$"),
    "write the position": ("open", r"\.tmp/progress\.json$"),
    "write the manifest": ("open", r"\.tmp/manifest\.json$"),
    "rename": ("os.rename", r"step_\d+\.tmp$"),
    "create the link": ("os.symlink", r"^step_\d+$"),
    "rename the link": ("os.rename", r"/last\.tmp$"),
    "rename an old one": ("os.rename", r"step_\d+$"),
    "delete": ("shutil.rmtree", r"step_\d+\.deleting$"),
    "delete a file": ("os.remove", r"^manifest\.json$"),
}
SHORT = (*OVERRIDES, "parallel=none", "epochs=2", "checkpoint.keep=1")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run(tmp_path_factory.mktemp("whole"), 1, *SHORT)


def die_before(event: str, pattern: str) -> Callable[[Trainer, Any], None]:
    """Return a function that kills a rank before it does this while a complete checkpoint exists."""
    is_hooked: list[bool] = []

    def act(trainer: Trainer, batch: Any) -> None:
        (path,) = Path(trainer.config.outputs, trainer.config.name).iterdir()

        def kill(name: str, arguments: tuple[Any, ...]) -> None:
            if name == event and re.search(pattern, str(arguments[0])) and list_checkpoints(path / "checkpoints"):
                os.kill(os.getpid(), signal.SIGKILL)

        if not is_hooked:
            is_hooked.append(True)
            sys.addaudithook(kill)  # only in the rank, which is forked

    return act


@pytest.mark.fault("kill -9 before each file operation of saving and deleting, also when resumed", outcome="survived")
@pytest.mark.parametrize(
    "operation",
    [pytest.param(name, marks=[] if name == "rename" else pytest.mark.thorough) for name in OPERATIONS],
)
def test_killed_before_a_file_operation_and_again_after_the_resume(operation: str, whole: Run, tmp_path: Path) -> None:
    killed = cut(tmp_path, 1, SHORT, die_before(*OPERATIONS[operation]))
    assert all_sound(killed.path / "checkpoints")
    resume = (f"resume={killed.path}", f"outputs={tmp_path}")
    again = cut(tmp_path, 1, resume, die_before(*OPERATIONS[operation]))
    assert all_sound(again.path / "checkpoints")
    resumed = run(tmp_path, 1, *resume)
    assert_same(resumed, whole)
    left = {path.name for path in (resumed.path / "checkpoints").iterdir()}
    assert left == {"last", "step_30"}


@pytest.mark.fault("a checkpoint directory that is removed during a save", outcome="refused")
def test_removed_checkpoints_are_named(tmp_path: Path) -> None:
    def remove(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and arguments[1] == "r" and str(arguments[0]).endswith(".tmp/rank_0.safetensors"):
            shutil.rmtree(Path(arguments[0]).parents[1], ignore_errors=True)

    def act(trainer: Trainer, batch: Any) -> None:
        sys.addaudithook(remove)

    with before_each_step(act), pytest.raises(RankError, match=r"checkpoints/step_7\.tmp was removed while the run"):
        run(tmp_path / "outputs", 1, *SHORT)
