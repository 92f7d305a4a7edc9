"""The seconds that a loss costs, which the record, the goodput, `runs show` and reports state."""

import signal
import time
from pathlib import Path
from typing import Any

import pytest
from fault_rig import OVERRIDES, before_each_step, cut, send
from test_lost_ranks import ELASTIC, WAIT_S, Ranks, kills
from worlds import Run, run

from runner.records.interruptions import Interruption, read_interruptions
from runner.records.listing import as_facts, read_entry
from runner.records.report.render import as_markdown, as_text
from runner.records.report.statistics import summarize
from runner.records.run_record import find_run
from runner.training.trainer import Trainer

SLOW_S, TIMEOUT_S = 0.5, 3


def only_interruption(ended: Run) -> Interruption:
    """Return the interruption after comparing it with the goodput: lost seconds are not productive."""
    (found,) = read_interruptions(ended.path)
    last = ended.lines[-2]  # of a step; the last one is of an evaluation
    elapsed_s = last["perf/productive_s"] / last["perf/goodput"]
    assert found.elapsed_s <= elapsed_s
    assert last["perf/productive_s"] + found.lost_s <= elapsed_s
    assert ended.result["goodput"] <= last["perf/goodput"] + 1e-4
    return found


def assert_shown(ended: Run, found: Interruption) -> None:
    assert as_facts(read_entry(ended.path, ended.path.parent))["interruptions"] == str(found)
    report = summarize([find_run(ended.path)])
    assert f"| {found.cause} | {found.lost_s:.2f} |" in as_markdown(report, "report", [])
    assert "seconds lost" in as_text(report)  # which folds long causes


@pytest.mark.fault("a rank that hangs, or that SIGSTOP stops, which is killed by the others", outcome="went_on")
def test_a_hang_costs_at_least_its_seconds(tmp_path: Path) -> None:
    """The others wait for `backend.timeout_s` within the step, and regroup afterwards: both counts."""

    def hang(trainer: Trainer, batch: Any) -> None:
        assert trainer.world.membership is not None
        if (trainer.world.membership.number, trainer.world.rank, trainer.state.step) == (0, 1, 10):
            time.sleep(WAIT_S)

    with before_each_step(hang):
        ranks = Ranks(tmp_path / "out", 2, *ELASTIC, "parallel=ddp", f"backend.timeout_s={TIMEOUT_S}").start()
        ended = ranks.finish(killed=[1])
    found = only_interruption(ended)
    assert found.attempt == 2 and found.step in (9, 10) and found.lost_s >= TIMEOUT_S
    assert "rank 1 on" in found.cause
    assert_shown(ended, found)


@pytest.mark.fault("kill -9 of a rank, without which the others continue", outcome="went_on")
def test_steps_that_are_done_again_are_lost(tmp_path: Path) -> None:
    """The writing rank dies in step 15; the newest copy was made before step 11, whose first time was slow."""

    def act(trainer: Trainer, batch: Any) -> None:
        membership = trainer.world.membership
        assert membership is not None
        if (membership.number, trainer.state.step) == (0, 10):
            time.sleep(SLOW_S)
        kills(0, 14)(trainer, batch)

    with before_each_step(act):
        ranks = Ranks(tmp_path / "out", 2, *ELASTIC, "parallel=ddp", "elastic_every_steps=10").start()
        ended = ranks.finish(killed=[0])
    found = only_interruption(ended)
    assert (found.step, found.cause[:12]) == (10, "lost rank 0 ") and found.lost_s >= SLOW_S


@pytest.mark.fault("kill -9 of a run, whose next attempt records the seconds lost", outcome="went_on")
def test_steps_after_the_checkpoint_are_lost(tmp_path: Path) -> None:
    """The run is killed in step 10, and its step 9 was slow; the newest checkpoint is that of step 7."""

    def act(trainer: Trainer, batch: Any) -> None:
        if trainer.state.step == 8:
            time.sleep(SLOW_S)
        send(signal.SIGKILL, 0, 9, once_saved=7)(trainer, batch)

    killed = cut(tmp_path, 1, (*OVERRIDES, "max_steps=12"), act)
    ended = run(tmp_path, 1, f"resume={killed.path}", f"outputs={tmp_path}")
    found = only_interruption(ended)
    assert (found.attempt, found.step, found.cause) == (2, 7, "killed") and found.lost_s >= SLOW_S
