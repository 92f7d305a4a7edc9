"""kill -9 of any rank at any step, in any mode, or of the whole run at any moment: resumed, the run is identical."""

import functools
import os
import random
import shutil
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fault_rig import OVERRIDES, STEPS, all_sound, assert_same, before_each_step, cut, send
from mode_cases import tier
from ranks import RankError
from worlds import MODES, Run, run

from runner.training.trainer import Trainer

REPEATS = 20
RANKS = {"none": 1, "dp": 1}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Run]:
    """Return the uninterrupted run in a mode."""

    @functools.cache
    def of(mode: str) -> Run:
        return run(tmp_path_factory.mktemp(mode), RANKS.get(mode, 2), *OVERRIDES, f"parallel={mode}")

    return of


@pytest.mark.fault("kill -9 of a random rank at a random step, in every mode", outcome="survived")
@pytest.mark.filterwarnings("ignore:parallel=dp")
@pytest.mark.parametrize(
    ("mode", "seed"),
    [
        pytest.param(mode, seed, marks=tier(False, seed == 0 and mode in ("none", "ddp", "pipeline")))
        for mode in MODES
        for seed in range(REPEATS)
    ],
)
def test_a_rank_killed_at_any_step(mode: str, seed: int, whole: Callable[[str], Run], tmp_path: Path) -> None:
    draw, num_ranks = random.Random(f"{mode} {seed}"), RANKS.get(mode, 2)
    # Until step 14 the first checkpoint may be incomplete.
    rank, step = draw.randrange(num_ranks), draw.randrange(15, STEPS)
    killed = cut(tmp_path, num_ranks, (*OVERRIDES, f"parallel={mode}"), send(signal.SIGKILL, rank, step))
    saved = all_sound(killed.path / "checkpoints")
    last = int(saved[-1].removeprefix("step_"))
    assert step - 14 < last <= step, "more is lost than one interval, and the checkpoint that was being written"
    resumed = run(tmp_path, num_ranks, f"resume={killed.path}", f"outputs={tmp_path}")
    assert "resuming after step" in (resumed.path / "log.txt").read_text()
    assert_same(resumed, whole(mode))


@pytest.mark.soak
@pytest.mark.fault("kill -9 of a run at a random moment", outcome="survived")
def test_a_run_killed_at_a_hundred_moments(tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    """During a save or not. After the first save there is always a complete checkpoint from which the run resumes."""
    draw, kills = random.Random(7), 0
    args = (*OVERRIDES, "checkpoint.every_steps=1", "epochs=10", "parallel=none")
    alone = run(tmp_path / "whole", 1, *args)
    while kills < 100:
        outputs = tmp_path / str(kills)
        while True:
            made = [Run(path) for path in outputs.glob("run/*")]
            typed = (f"resume={made[0].path}", f"outputs={outputs}") if made else args
            try:
                with before_each_step(die_within(draw.uniform(0.0, 1.0))):
                    done = run(outputs, 1, *typed)
                break
            except RankError as error:
                assert f"status {-signal.SIGKILL}" in str(error)
                kills += 1
            (path,) = outputs.glob("run/*")
            if not all_sound(path / "checkpoints"):
                shutil.rmtree(outputs)  # before the first checkpoint: it restarts
        assert_same(done, alone)
    record_property("injected", kills)


def die_within(seconds: float) -> Callable[[Trainer, Any], None]:
    """Return a function that kills the process, by a timer, `seconds` after the first step."""
    started: list[threading.Timer] = []

    def act(trainer: Trainer, batch: Any) -> None:
        if not started:
            started.append(threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL)))
            started[0].daemon = True  # a run that finishes earlier survives
            started[0].start()

    return act
