"""kill -9 of any rank at any step, in any mode, and of the whole run at any moment: resumed, it is the same run."""

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
from commands import Commands
from fault_rig import STEPS, WORDS, all_sound, assert_same, before_each_step, cut, send
from ranks import RankError
from worlds import Run, run

from runner.training.trainer import Trainer

MODES = ("allreduce", "ddp", "fsdp", "pipeline", "ps", "tp", "zero")
REPEATS = 20


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Run]:
    """The run that is left alone, in that mode."""

    @functools.cache
    def of(mode: str) -> Run:
        return run(tmp_path_factory.mktemp(mode), 2, *WORDS, f"parallel={mode}")

    return of


@pytest.mark.fault("kill -9 of a random rank at a random step, in every mode", outcome="survived")
@pytest.mark.parametrize(
    ("mode", "seed"),
    [
        pytest.param(mode, seed, marks=pytest.mark.soak if seed else pytest.mark.thorough)
        for mode in MODES
        for seed in range(REPEATS)
    ],
)
def test_a_rank_killed_at_any_step(mode: str, seed: int, whole: Callable[[str], Run], tmp_path: Path) -> None:
    draw = random.Random(f"{mode} {seed}")
    rank, step = draw.randrange(2), draw.randrange(15, STEPS)  # until 14 the first checkpoint may be in writing
    killed = cut(tmp_path, 2, (*WORDS, f"parallel={mode}"), send(signal.SIGKILL, rank, step))
    saved = all_sound(killed.path / "checkpoints")
    last = int(saved[-1].removeprefix("step_"))
    assert step - 14 < last <= step, "more is lost than one interval, and the checkpoint that was being written"
    resumed = run(tmp_path, 2, f"resume={killed.path}", f"outputs={tmp_path}")
    assert "resuming after step" in (resumed.path / "log.txt").read_text()
    assert_same(resumed, whole(mode))


@pytest.mark.soak
@pytest.mark.fault("kill -9 of a run at a random moment", outcome="survived")
def test_a_run_killed_at_a_hundred_moments(tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    """In a save or not. From the first one on a complete checkpoint is there, from which the run goes on."""
    draw, kills = random.Random(7), 0
    words = (*WORDS, "checkpoint.every_steps=1", "epochs=10", "parallel=none")
    alone = run(tmp_path / "whole", 1, *words)
    while kills < 100:
        outputs = tmp_path / str(kills)
        while True:
            made = [Run(path) for path in outputs.glob("run/*")]
            typed = (f"resume={made[0].path}", f"outputs={outputs}") if made else words
            try:
                with before_each_step(die_within(draw.uniform(0.0, 1.0))):
                    done = run(outputs, 1, *typed)
                break
            except RankError as error:
                assert f"status {-signal.SIGKILL}" in str(error)
                kills += 1
            (path,) = outputs.glob("run/*")
            if not all_sound(path / "checkpoints"):
                shutil.rmtree(outputs)  # before the first one: it starts again
        assert_same(done, alone)
    record_property("injected", kills)


def die_within(seconds: float) -> Callable[[Trainer, Any], None]:
    """Of the first step on, by a signal that comes at any moment."""
    started: list[threading.Timer] = []

    def act(trainer: Trainer, batch: Any) -> None:
        if not started:
            started.append(threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL)))
            started[0].daemon = True  # a run that ends before that lives
            started[0].start()

    return act


@pytest.mark.soak
@pytest.mark.fault("a clean end of all ranks", outcome="went_on")
def test_fifty_commands_end_with_status_0(commands: Commands, record_property: Callable[[str, object], None]) -> None:
    """Which a process group that outlives its run would abort at the exit of one of them."""
    words = ("model=mlp", "parallel=ddp", "launcher=spawn", "launcher.nproc_per_node=2", "max_steps=3", "logger=none")
    for _ in range(50):
        done = commands.runner(*words)
        assert (done.returncode, done.stderr) == (0, "")
    record_property("injected", 50)
