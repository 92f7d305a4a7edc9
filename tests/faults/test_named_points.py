"""kill -9 at every fail point of saving and deleting, also in a resumed run: a complete checkpoint remains."""

import os
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fault_rig import OVERRIDES, all_sound, assert_same, before_each_step, cut
from ranks import RankError
from worlds import Run, run

from runner.checkpoints import retention
from runner.paths import ROOT
from runner.training.trainer import Trainer

# All fail points in the code, including new ones.
POINTS = sorted(
    {
        name
        for path in (ROOT / "runner").rglob("*.py")
        for name in re.findall(r'\breached\("([^"]+)"\)', path.read_text())
    }
)
SHORT = (*OVERRIDES, "parallel=none", "epochs=2", "checkpoint.keep=1")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run(tmp_path_factory.mktemp("whole"), 1, *SHORT)


def die_at(point: str, time: int) -> Callable[[Trainer, Any], None]:
    """Return a function that kills a rank when it reaches the fail point for the `time`-th time."""
    met: list[str] = []

    def watch(name: str) -> None:
        met.append(name)
        if met.count(point) == time:
            os.kill(os.getpid(), signal.SIGKILL)

    def act(trainer: Trainer, batch: Any) -> None:
        if watch not in retention.watchers:
            retention.watchers.append(watch)

    return act


@pytest.mark.fault("kill -9 at each fail point of saving and deleting, also of a resumed run", outcome="survived")
@pytest.mark.parametrize(
    "point", [pytest.param(point, marks=[] if "rename" in point else pytest.mark.thorough) for point in POINTS]
)
def test_killed_at_a_fail_point_and_again_after_the_resume(point: str, whole: Run, tmp_path: Path) -> None:
    killed = cut(tmp_path, 1, SHORT, die_at(point, 2))
    assert all_sound(killed.path / "checkpoints")
    resume = (f"resume={killed.path}", f"outputs={tmp_path}")
    again = cut(tmp_path, 1, resume, die_at(point, 1))
    assert all_sound(again.path / "checkpoints")
    resumed = run(tmp_path, 1, *resume)
    assert_same(resumed, whole)
    left = {path.name for path in (resumed.path / "checkpoints").iterdir()}
    assert left == {"last", "step_30"}


@pytest.mark.fault("a checkpoint directory that is removed during a save", outcome="refused")
def test_removed_checkpoints_are_named(tmp_path: Path) -> None:
    def act(trainer: Trainer, batch: Any) -> None:
        def remove(name: str) -> None:
            if name == "save: shards written":
                shutil.rmtree(tmp_path, ignore_errors=True)

        retention.watchers[:] = [remove]

    with before_each_step(act), pytest.raises(RankError, match=r"checkpoints/step_7\.tmp was removed while the run"):
        run(tmp_path / "outputs", 1, *SHORT)


def test_fail_points_surround_each_change_of_the_disk() -> None:
    assert {"save: begin", "save: before rename", "save: renamed", "remove: renamed"} <= set(POINTS)
