"""kill -9 of random ranks at random moments, while the others continue: the run equals one that nothing has disturbed.

`python -m pytest -m "soak or thorough" -n 0 tests/faults/test_random_kills.py` prints a table of all kills.
`KILLS_SEED=5` in the environment draws other ranks and moments.
"""

import functools
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import wait_until
from fault_rig import all_sound, before_each_step
from test_lost_ranks import ELASTIC, NUM_STEPS, STATEFUL, WAIT_S, Ranks, assert_equal
from worlds import Run, run

from runner.distributed.collectives import Collectives
from runner.distributed.membership import Membership
from runner.parallel.parameter_update import ParameterUpdate
from runner.training import trainer as training
from runner.training.callbacks.checkpointing import Checkpointing
from runner.training.trainer import Trainer

MODES, SIZES = ("ddp", "allreduce", "zero"), (2, 3, 4)
# BatchNorm over the whole batch, dropout, averaged weights, clipping and micro-batches.
MODEL = ("model=mlp", "model.hidden=[16,8]", "model.batch_norm=true", "model.dropout=0.2")
WORDS = (*MODEL, *(word for word in ELASTIC if not word.startswith(("model", "elastic"))), *STATEFUL)
CALLS: dict[str, tuple[Any, str]] = {
    "forward": (torch.nn.Linear, "forward"),
    "backward": (torch.autograd, "backward"),
    "sum over the ranks": (Collectives, "sum"),
    "step of the optimizer": (ParameterUpdate, "step"),
    "evaluation": (training, "evaluate"),
    "save": (Checkpointing, "_save"),
}
WITHIN_S = 0.02  # after the start of the call
MOMENTS = (*CALLS, "rank 0", "two at once", "a joining rank", "any time")
IN_CI = (("two at once", 4, "ddp"), ("a joining rank", 3, "zero"), ("any time", 3, "allreduce"))
CELLS = [
    pytest.param(*cell, marks=pytest.mark.thorough if cell in IN_CI else pytest.mark.soak)
    for cell in ((moment, size, mode) for moment in MOMENTS for size in SIZES for mode in MODES)
    if cell[:2] != ("two at once", 2)  # one rank has to be left
]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Return the undisturbed run of one process."""
    return run(tmp_path_factory.mktemp("whole"), 1, *WORDS)


@pytest.fixture(scope="module")
def counts(request: pytest.FixtureRequest) -> Iterator[Counter[tuple[str, int, str]]]:
    """Yield the number of kills, and of those after which the run was equal, by moment and number of ranks."""
    found: Counter[tuple[str, int, str]] = Counter()
    yield found
    lines = ["| killed in | " + " | ".join(f"{size} ranks" for size in SIZES) + " |", "|---|" + "---|" * len(SIZES)]
    for moment in MOMENTS:
        cells = [f"{found[moment, size, 'equal']} of {found[moment, size, 'kills']}" for size in SIZES]
        lines.append(f"| {moment} | " + " | ".join(cells) + " |")
    total = {what: sum(n for (*_, each), n in found.items() if each == what) for what in ("equal", "kills")}
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        print("", *lines, f"equal after {total['equal']} of {total['kills']} kills", sep="\n")


def die_within(seconds: float) -> None:
    """Kill this process after `seconds`, whatever it does then."""
    timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL))
    timer.daemon = True
    timer.start()


def kill_in_call(patch: pytest.MonkeyPatch, call: tuple[Any, str], victims: dict[int, float], step: int) -> None:
    """Let ranks be killed soon after their next call of a function begins, or directly after the call, in a step.

    victims: the seconds from the start of the call by rank of the first world.
    """
    owner, name = call
    original, original_step, armed = getattr(owner, name), Trainer.step, list[float]()

    def call_until_killed(*args: Any, **options: Any) -> Any:
        if not armed:
            return original(*args, **options)
        die_within(armed[0])
        original(*args, **options)
        time.sleep(WAIT_S)

    def arm_and_step(self: Trainer, batch: Any) -> None:
        membership, rank = self.world.membership, self.world.rank
        if membership is not None and (membership.number, self.state.step) == (0, step) and rank in victims:
            armed.append(victims[rank])
        original_step(self, batch)

    patch.setattr(owner, name, call_until_killed)
    patch.setattr(Trainer, "step", arm_and_step)


def kill_joining(patch: pytest.MonkeyPatch, file: Path, seconds: float) -> None:
    """Let the first process that joins be killed `seconds` after it has begun to wait. The file notes that one is."""
    join = Membership.join

    def join_until_killed(self: Membership, *args: Any) -> Any:
        try:
            file.touch(exist_ok=False)
            die_within(seconds)
        except FileExistsError:
            pass
        return join(self, *args)

    patch.setattr(Membership, "join", join_until_killed)


def wait_for_kill(ranks: Ranks, number: int) -> None:
    """Wait until a process was killed. One that waits to join is released if the job ends earlier."""
    wait_until(lambda: ranks.processes[number].exitcode is not None, timeout_s=WAIT_S)


def kill_at_any_time(ranks: Ranks, draw: random.Random) -> None:
    """Kill two processes one after the other, each of which is replaced."""
    wait_until(lambda: bool(ranks.lines()), timeout_s=WAIT_S)
    log = next(ranks.folder.glob("run/*/log.txt"))
    for number in range(2):
        if ranks.num_ranks == 2:  # one of them must be left, and have a copy
            has_two = functools.partial(lambda least: log.read_text().count("2 ranks con") >= least, number)
            wait_until(has_two, timeout_s=WAIT_S)
        time.sleep(draw.uniform(0, 1))
        running = [n for n, process in enumerate(ranks.processes) if process.exitcode is None]
        if len(running) > 1 and not any(line["step"] > NUM_STEPS - 5 for line in ranks.lines()):
            ranks.kill(draw.choice(running))
            ranks.start_another()


@pytest.mark.fault(
    "kill -9 of random ranks in every part of a step, an evaluation, a save or a join", outcome="went_on"
)
@pytest.mark.parametrize(("moment", "num_ranks", "mode"), CELLS)
def test_random_kills(
    moment: str, num_ranks: int, mode: str, whole: Run, tmp_path: Path, counts: Counter[tuple[str, int, str]]
) -> None:
    draw = random.Random(f"{moment} {num_ranks} {mode} {os.environ.get('KILLS_SEED', '')}")
    call = CALLS.get(moment) or draw.choice([*CALLS.values()])
    first = [0] if moment == "rank 0" else draw.sample(range(num_ranks), 2 if moment == "two at once" else 1)
    delays, step = {rank: draw.uniform(0, WITHIN_S) for rank in first}, draw.randrange(1, NUM_STEPS - 6)
    is_replaced = moment == "a joining rank" or draw.random() < 0.5
    elastic = f"elastic_every_steps={draw.choice((1, 1, 3))}"
    with before_each_step(lambda trainer, batch: time.sleep(0.04)), pytest.MonkeyPatch.context() as patch:
        if moment == "any time":
            first = []
        else:
            kill_in_call(patch, call, delays, step)
        if moment == "a joining rank":
            kill_joining(patch, tmp_path / "joining", draw.uniform(0, 1))
        ranks = Ranks(tmp_path / "out", num_ranks, *WORDS, elastic, f"parallel={mode}").start()
        try:
            for number in first:
                wait_for_kill(ranks, number)
                if is_replaced:
                    ranks.start_another()
            if moment == "any time":
                kill_at_any_time(ranks, draw)
            elif moment == "a joining rank":
                wait_for_kill(ranks, num_ranks)
                ranks.start_another()
            ranks.wait()
        except BaseException:
            ranks.close()
            raise
    ends = [process.exitcode for process in ranks.processes]
    num_kills = ends.count(-signal.SIGKILL)
    counts[moment, num_ranks, "kills"] += num_kills
    assert num_kills >= len(first) and set(ends) <= {0, -signal.SIGKILL}
    (path,) = (ranks.folder / "run").iterdir()
    ended = Run(path)
    assert_equal(ended, whole)
    all_sound(ended.path / "checkpoints")
    counts[moment, num_ranks, "equal"] += num_kills


# A check of the checks: a run whose dropout has other random numbers is not equal.
@pytest.mark.soak
def test_another_seed_is_not_equal(whole: Run, tmp_path: Path) -> None:
    with pytest.raises(AssertionError):
        assert_equal(run(tmp_path, 1, *WORDS, "seed=5"), whole)
