"""Ranks that are lost, stopped or join while the others continue: the run equals one that nothing has disturbed."""

import itertools
import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from adapted_models import GPT_WORDS, gpt, write_files
from commands import free_port, wait_until
from fault_rig import OVERRIDES, all_sound, before_each_step
from ranks import RankError
from sample_log import samples_of
from streams import overrides as stream
from torch.distributed.optim import ZeroRedundancyOptimizer
from worlds import Run, configure, run

from runner import Callback
from runner.checkpoints import save
from runner.checkpoints.saved_state import LocalState, SavedState
from runner.config.request import Request
from runner.distributed.backend import as_backend
from runner.distributed.collectives import Collectives
from runner.distributed.environment import RankInfo
from runner.distributed.failures import heartbeat
from runner.distributed.membership import JobEnded
from runner.distributed.process_group import ProcessGroup
from runner.distributed.rendezvous import serve_store
from runner.distributed.world import World
from runner.errors import InputError
from runner.jobs.equal_input import check_joining
from runner.jobs.job import run_job
from runner.parallel.parameter_update import ParameterUpdate
from runner.training import state_copies
from runner.training import trainer as training
from runner.training.callbacks.contract import Outcome, Progress, RunInfo, Update
from runner.training.state_copies import StateCopies
from runner.training.trainer import Trainer

Act = Callable[[Trainer, Any], None]
NUM_STEPS = 30
ELASTIC = (*OVERRIDES, f"max_steps={NUM_STEPS}", "precision=fp64", "threads=1", "elastic_every_steps=1")
# What adds state: averaged weights, sums over the whole batch, evaluations within an epoch, micro-batches.
STATEFUL = ("ema.decay=0.9", "clip_grad_norm=1", "eval_every_steps=4", "micro_batches=2", "train_metrics=true")
LOGGED = ("+callbacks.log._target_=sample_log.SampleLog",)
NUM_SAMPLES = 2 * 1437  # of the steps, which are two epochs
EXACT = 1e-9
WAIT_S = 120


class Ranks:
    """The processes of one elastic job, which a test kills, stops and starts.

    are_apart: each process is on another machine, as far as it knows.
    """

    def __init__(self, folder: Path, num_ranks: int, *overrides: str, are_apart: bool = False):
        config, request = configure(*overrides, f"outputs={folder}")
        self.folder, self.request, self.num_ranks = folder, replace(request, config=config), num_ranks
        self._are_apart = are_apart
        self._fork, self._port = multiprocessing.get_context("fork").Process, free_port()
        # Its own process, as the agent of a launcher: a rank that is killed must not leave a damaged store.
        self._store = self._fork(target=self._serve)
        self.processes = [self._fork(target=self._run, args=(rank,)) for rank in range(num_ranks)]

    def start(self) -> "Ranks":
        self.folder.mkdir(exist_ok=True)
        self._store.start()
        for process in self.processes:
            process.start()
        return self

    def start_another(self) -> None:
        """Start a process that joins the ranks that are left."""
        self.processes.append(self._fork(target=self._run, args=(None,)))
        self.processes[-1].start()

    def wait(self) -> None:
        """Wait until all processes have ended, and close the store."""
        try:
            deadline = time.monotonic() + WAIT_S
            for process in self.processes:
                process.join(max(0.0, deadline - time.monotonic()))
        finally:
            self.close()

    def kill(self, number: int, signal_number: signal.Signals = signal.SIGKILL) -> None:
        os.kill(self.processes[number].pid or 0, signal_number)

    def finish(self, killed: Sequence[int] = ()) -> Run:
        """Wait until all processes have ended, those that were not killed with status 0. Return the run."""
        self.wait()
        ends = [0 if number not in killed else -signal.SIGKILL for number in range(len(self.processes))]
        assert [process.exitcode for process in self.processes] == ends
        (path,) = (self.folder / "run").iterdir()
        return Run(path)

    def close(self) -> None:
        for process in (*self.processes, self._store):
            if process.pid is not None:
                process.kill()
                process.join()

    def lines(self) -> list[dict[str, Any]]:
        found = [*self.folder.glob("run/*/metrics.jsonl")]
        return Run(found[0].parent).lines if found else []

    def wait_for_step(self, step: int) -> None:
        wait_until(lambda: any(line["step"] >= step for line in self.lines()), timeout_s=WAIT_S)

    def _serve(self) -> None:
        store = serve_store("localhost", self._port, loopback=True, timeout_s=WAIT_S)
        time.sleep(10 * WAIT_S)
        del store

    def _run(self, rank: int | None) -> None:
        request: Request = self.request
        local_rank, local_size, machine = rank or 0, self.num_ranks, ""
        if self._are_apart:
            local_rank, local_size, machine = 0, 1, f"machine {os.getpid()}"
            heartbeat.machine_id = lambda: machine
        kept = str(self.folder / f"kept{machine}")  # as the agent of a machine keeps values
        info = RankInfo(rank or 0, local_rank, self.num_ranks, local_size, source="test", restart_file=kept)
        wait_until(lambda: is_listening(self._port), timeout_s=WAIT_S)
        timeout = timedelta(seconds=WAIT_S)
        store = dist.TCPStore("localhost", self._port, is_master=False, timeout=timeout, wait_for_workers=False)
        world = World(info, store, as_backend(request.config.backend))
        status = 1
        try:
            if rank is None:
                world.join_later(lambda first: check_joining(request.config, first))
            run_job(request, world)
            status = 0
        except JobEnded:
            status = 0
        finally:
            world.shutdown.report_before_exit(lambda: None)
            os._exit(status)  # skips the exit handlers of the tests' process


def is_listening(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("localhost", port)):
        return True
    return False


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Return the undisturbed run of one process."""
    words = [word for word in (*ELASTIC, *STATEFUL, *LOGGED) if not word.startswith("elastic")]
    return run(tmp_path_factory.mktemp("whole"), 1, *words)


def assert_equal(one: Run, whole: Run) -> None:
    """Compare weights, every logged value and the samples of every step, up to rounding in float64."""
    assert one.result["state"] == "finished"
    for name, weight in whole.weights.items():
        assert (one.weights[name] - weight).abs().max() <= EXACT * weight.abs().max(), name
    timed = ("perf/", "train/skipped")
    assert [line["step"] for line in one.lines] == [line["step"] for line in whole.lines]
    for line, expected in zip(one.lines, whole.lines, strict=True):
        for key, value in expected.items():
            if not key.startswith(timed):
                assert line[key] == pytest.approx(value, rel=EXACT, abs=1e-12), (line["step"], key)


def assert_same_samples(one: Run, whole: Run) -> None:
    """Compare the logs of the samples. A step that was done again has its samples once more."""

    def logged(run: Run) -> dict[tuple[int, int], list[str]]:
        return {step: sorted({*map(str, pairs)}) for step, pairs in samples_of(run).items()}

    assert logged(one) == logged(whole)


def kills(process: int, step: int) -> Act:
    """Return a function that kills a process that has forked as this rank, before a step."""

    def act(trainer: Trainer, batch: Any) -> None:
        assert trainer.world.membership is not None
        position = (trainer.world.membership.number, trainer.world.rank, trainer.state.step)
        if position == (0, process, step):
            os.kill(os.getpid(), signal.SIGKILL)

    return act


def slowly(trainer: Trainer, batch: Any) -> None:
    """Make steps last so long that the test can act before the run ends."""
    time.sleep(0.05)


def until_joined(folder: Path, size: int) -> Act:
    """Return a function that lets a smaller world than `size` wait in step 12 until a process waits to join it.

    Once the file `has-acted` exists in the folder, no world waits.
    """

    def act(trainer: Trainer, batch: Any) -> None:
        slowly(trainer, batch)
        membership, world = trainer.world.membership, trainer.world
        assert membership is not None
        if membership.number and world.rank == 0 and world.world_size < size and trainer.state.step >= 12:
            wait_until(lambda: membership.is_awaited() or (folder / "has-acted").exists(), timeout_s=WAIT_S)

    return act


def in_call(owner: Any, name: str, after: bool) -> Callable[[pytest.MonkeyPatch, int, int], None]:
    """Return a function that lets a rank be killed before or after its next call of a function, from a step on."""

    def patch(monkeypatch: pytest.MonkeyPatch, process: int, step: int) -> None:
        original, armed = getattr(owner, name), list[bool]()

        def replaced(*args: Any, **options: Any) -> Any:
            if armed and not after:
                os.kill(os.getpid(), signal.SIGKILL)
            result = original(*args, **options)
            if armed:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        def arm(trainer: Trainer, batch: Any) -> None:
            assert trainer.world.membership is not None
            if (trainer.world.membership.number, trainer.world.rank, trainer.state.step) == (0, process, step):
                armed.append(True)

        monkeypatch.setattr(owner, name, replaced)
        original_step = Trainer.step
        monkeypatch.setattr(Trainer, "step", lambda self, batch: (arm(self, batch), original_step(self, batch))[1])

    return patch


MOMENTS = {
    "before a copy is sent": in_call(dist, "isend", after=False),
    "after a copy is sent": in_call(dist, "isend", after=True),
    "after its part of the update": in_call(ZeroRedundancyOptimizer, "_local_step", after=True),
    "before a sum": in_call(Collectives, "sum", after=False),
    "after a sum": in_call(Collectives, "sum", after=True),
    "before the update": in_call(ParameterUpdate, "step", after=False),
    "after the update": in_call(ParameterUpdate, "step", after=True),
    "in an evaluation": in_call(training, "evaluate", after=False),
    "after an evaluation": in_call(training, "evaluate", after=True),
    "while saving": in_call(save, "write_shard", after=False),
}
OF_ZERO = ("before a copy is sent", "after a copy is sent", "after its part of the update")


@pytest.mark.fault("kill -9 of a rank, without which the others continue", outcome="went_on")
@pytest.mark.parametrize(
    ("moment", "process", "mode"),
    [
        *((moment, 0, "ddp") for moment in MOMENTS if moment not in OF_ZERO),
        *(
            pytest.param(moment, 1, "ddp", marks=pytest.mark.thorough)
            for moment in MOMENTS
            if moment not in (*OF_ZERO, "while saving")  # rank 1 writes no file
        ),
        ("after a sum", 1, "allreduce"),
        *((moment, 1, "zero") for moment in OF_ZERO),
        ("while saving", 1, "zero"),
        *(pytest.param(moment, 0, "zero", marks=pytest.mark.thorough) for moment in MOMENTS),
    ],
)
def test_others_continue(
    moment: str, process: int, mode: str, whole: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    MOMENTS[moment](monkeypatch, process, 10)
    ranks = Ranks(tmp_path / "out", 2, *ELASTIC, *STATEFUL, f"parallel={mode}").start()
    ended = ranks.finish(killed=[process])
    assert_equal(ended, whole)
    assert "resuming" not in (ended.path / "log.txt").read_text(), "no checkpoint is read"
    assert f"lost rank {process} on" in (ended.path / "log.txt").read_text()
    all_sound(ended.path / "checkpoints")


@pytest.mark.fault("kill -9 of two of four ranks at once", outcome="went_on")
@pytest.mark.parametrize(
    ("mode", "killed", "start"),
    [
        pytest.param("ddp", (0, 2), "step ", marks=pytest.mark.thorough),
        ("zero", (0, 2), "step "),
        ("zero", (1, 2), "the newest checkpoint"),  # rank 2 had the only other copy of what rank 1 had
    ],
)
def test_two_lost_at_once(mode: str, killed: Sequence[int], start: str, whole: Run, tmp_path: Path) -> None:
    """They are stopped first, so that the others notice both."""

    def act(trainer: Trainer, batch: Any) -> None:
        assert trainer.world.membership is not None
        number, step, rank = trainer.world.membership.number, trainer.state.step, trainer.world.rank
        if (number, step) == (0, 10) and rank in killed:
            (tmp_path / f"arrived-{rank}").touch()
            time.sleep(WAIT_S)

    with before_each_step(act):
        ranks = Ranks(tmp_path / "out", 4, *ELASTIC, *STATEFUL, f"parallel={mode}").start()
        try:
            wait_until(lambda: all((tmp_path / f"arrived-{rank}").exists() for rank in killed), timeout_s=WAIT_S)
            for rank in killed:
                ranks.kill(rank)
        except BaseException:
            ranks.close()
            raise
        ended = ranks.finish(killed=killed)
    assert_equal(ended, whole)
    assert f": 2 ranks continued after {start}" in (text := (ended.path / "log.txt").read_text())
    assert ("resuming after step 7" in text) == (start == "the newest checkpoint")


@pytest.mark.fault(
    "kill -9 of two of four ranks before they send the parameters that they have updated", outcome="went_on"
)
def test_two_lost_before_parameters_are_sent(whole: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others do not wait for each other until backend.timeout_s, which is longer than the test waits."""
    for rank in (0, 2):
        MOMENTS["after its part of the update"](monkeypatch, rank, 10)
    ranks = Ranks(tmp_path / "out", 4, *ELASTIC, *STATEFUL, "parallel=zero").start()
    assert_equal(ranks.finish(killed=[0, 2]), whole)


@pytest.mark.thorough
@pytest.mark.fault("kill -9 of a rank while the others restore what a lost rank had", outcome="went_on")
def test_lost_while_restoring(whole: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks 0 and 2 of four are left, which have copies of what ranks 3 and 1 had."""
    share, broadcast = state_copies._share, dist.broadcast

    def share_until_killed(own: Any, world: World) -> Any:
        num_sent = itertools.count()

        def send_until_killed(*args: Any, **options: Any) -> Any:
            if next(num_sent) == 5 and (world.rank_info.restart, world.rank) == (1, 2):
                os.kill(os.getpid(), signal.SIGKILL)
            return broadcast(*args, **options)

        with monkeypatch.context() as patch:
            patch.setattr(dist, "broadcast", send_until_killed)
            return share(own, world)

    monkeypatch.setattr(state_copies, "_share", share_until_killed)
    with before_each_step(kills(1, 10)):
        ranks = Ranks(tmp_path / "out", 4, *ELASTIC, *STATEFUL, "parallel=zero").start()
        ended = ranks.finish(killed=[1, 3])
    assert_equal(ended, whole)
    assert "resuming" not in (ended.path / "log.txt").read_text()


@pytest.mark.thorough
@pytest.mark.fault("ranks that are lost and join: 2, 1, 3, 2 ranks in one run", outcome="went_on")
@pytest.mark.parametrize("mode", [("ddp",), ("zero", "parallel.parameters_as_bucket_view=true")], ids="-".join)
def test_ranks_join(mode: Sequence[str], whole: Run, tmp_path: Path) -> None:
    with before_each_step(until_joined(tmp_path, 3)):
        ranks = Ranks(tmp_path / "out", 2, *ELASTIC, *STATEFUL, *LOGGED, f"parallel={mode[0]}", *mode[1:]).start()
        try:
            ranks.wait_for_step(8)
            ranks.kill(0)
            log = next(ranks.folder.glob("run/*/log.txt"))
            wait_until(lambda: "1 rank continued" in log.read_text(), timeout_s=WAIT_S)
            for _ in range(2):
                ranks.start_another()
            wait_until(lambda: "3 ranks continued" in log.read_text(), timeout_s=WAIT_S)
            (tmp_path / "has-acted").touch()
            ranks.kill(2)
        except BaseException:
            ranks.close()
            raise
        ended = ranks.finish(killed=[0, 2])
    assert_equal(ended, whole)
    text = (ended.path / "log.txt").read_text()
    assert "resuming" not in text
    assert text.count(" joined") in (1, 2)
    assert text.count("lost rank") == 2
    assert_same_samples(ended, whole)


@pytest.mark.thorough
@pytest.mark.fault("a rank that hangs, or that SIGSTOP stops, which is killed by the others", outcome="went_on")
@pytest.mark.parametrize("mode", ["ddp", "zero"])
@pytest.mark.parametrize("hangs", [True, False])
def test_a_rank_that_does_not_respond(hangs: bool, mode: str, whole: Run, tmp_path: Path) -> None:
    def stop(trainer: Trainer, batch: Any) -> None:
        assert trainer.world.membership is not None
        if (trainer.world.membership.number, trainer.world.rank, trainer.state.step) == (0, 0, 10):
            if hangs:
                time.sleep(WAIT_S)
            os.kill(os.getpid(), signal.SIGSTOP)

    with before_each_step(stop):
        ranks = Ranks(tmp_path / "out", 2, *ELASTIC, *STATEFUL, f"parallel={mode}", "backend.timeout_s=3").start()
        ended = ranks.finish(killed=[0])
    assert_equal(ended, whole)
    assert "in step 10 for" in (text := (ended.path / "log.txt").read_text())
    assert "it was killed with SIGKILL: 1 rank continued after step" in text


@pytest.mark.fault("a rank of another machine that returns after the others have continued", outcome="went_on")
@pytest.mark.parametrize("mode", ["ddp", pytest.param("zero", marks=pytest.mark.thorough)])
def test_an_excluded_rank_returns(mode: str, whole: Run, tmp_path: Path) -> None:
    """It writes nothing for the steps that the others have done meanwhile, and is counted once."""
    words = (*ELASTIC, *STATEFUL, *LOGGED, f"parallel={mode}", "backend.timeout_s=3")
    with before_each_step(until_joined(tmp_path, 2)):
        ranks = Ranks(tmp_path / "out", 2, *words, are_apart=True).start()
        try:
            ranks.wait_for_step(8)
            ranks.kill(0, signal.SIGSTOP)
            log = next(ranks.folder.glob("run/*/log.txt"))
            wait_until(lambda: "1 rank continued" in log.read_text(), timeout_s=WAIT_S)
            ranks.kill(0, signal.SIGCONT)
            wait_until(lambda: "1 joined: 2 ranks" in log.read_text(), timeout_s=WAIT_S)
        except BaseException:
            ranks.close()
            raise
        ended = ranks.finish()
    assert_equal(ended, whole)
    assert_same_samples(ended, whole)
    assert ended.result["world_size"] == 2


@pytest.mark.thorough
@pytest.mark.fault("kill -9 of a rank of another machine while the ranks form their process group", outcome="went_on")
def test_a_rank_of_another_machine_is_lost_while_the_group_forms(
    whole: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    form = ProcessGroup.form

    def form_or_die(self: ProcessGroup, *args: Any) -> None:
        if (self._rank_info.restart, self._rank_info.rank) == (1, 1):
            os.kill(os.getpid(), signal.SIGKILL)
        self._store.gather("test", "")  # as for the addresses of ranks on several machines
        form(self, *args)

    monkeypatch.setattr(ProcessGroup, "form", form_or_die)
    with before_each_step(kills(2, 10)):
        words = (*ELASTIC, *STATEFUL, "parallel=ddp", "backend.timeout_s=3")
        ranks = Ranks(tmp_path / "out", 3, *words, are_apart=True).start()
        assert_equal(ranks.finish(killed=[1, 2]), whole)


def test_an_error_of_a_rank_is_no_loss(tmp_path: Path) -> None:
    def fail(trainer: Trainer, batch: Any) -> None:
        if trainer.world.rank == 1 and trainer.state.step == 10:
            raise ValueError("wrong")

    with before_each_step(fail):
        ranks = Ranks(tmp_path / "out", 2, *ELASTIC, "parallel=ddp").start()
        ranks.wait()
    assert [process.exitcode for process in ranks.processes] == [1, 1]
    (path,) = (tmp_path / "out" / "run").iterdir()
    assert "ValueError: wrong" in Run(path).result["error"]


def run_without_rank_1(folder: Path, parallel: str) -> Run:
    """Return a run of two ranks, of which rank 1 is killed before step 11."""
    with before_each_step(kills(1, 10)):
        return Ranks(folder, 2, *ELASTIC, *STATEFUL, f"parallel={parallel}").start().finish(killed=[1])


def test_a_part_that_is_missing_is_found(whole: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep = StateCopies.before_step

    def keep_without_others(self: StateCopies, state: Any) -> None:
        self.has_parts = False
        keep(self, state)

    monkeypatch.setattr(StateCopies, "before_step", keep_without_others)
    ended = run_without_rank_1(tmp_path / "out", "zero")
    with pytest.raises(AssertionError):
        assert_equal(ended, whole)


class Counted(Callback):
    """Counts the samples of its rank. A world continues with the count of all ranks on its first one."""

    def __init__(self) -> None:
        self.first_seen = 0

    def on_start(self, run: RunInfo) -> None:
        self.rank, self.seen = run.rank, 0 if run.rank else self.first_seen
        self.path = run.directory / f"seen-{run.rank}"

    def allows_update(self, update: Update) -> bool:
        self.seen += sum(micro_batch.num_samples for micro_batch in update.batch.micro_batches)
        return True

    def state(self, model: LocalState) -> LocalState:
        return LocalState(facts={"seen": {str(self.rank): self.seen}})

    def load_state(self, saved: SavedState) -> None:
        self.first_seen = sum(saved.facts["seen"].values())

    def on_end(self, now: Progress, outcome: Outcome) -> None:
        if outcome == "finished":
            self.path.write_text(str(self.seen))


def test_what_only_one_rank_had_of_a_callback(whole: Run, tmp_path: Path) -> None:
    with before_each_step(kills(0, 10)):
        callback = "+callbacks.seen._target_=test_lost_ranks.Counted"
        ranks = Ranks(tmp_path / "out", 3, *ELASTIC, *STATEFUL, "parallel=ddp", callback).start()
        ended = ranks.finish(killed=[0])
    assert_equal(ended, whole)
    assert sum(int(path.read_text()) for path in ended.path.glob("seen-*")) == NUM_SAMPLES


@pytest.mark.parametrize(
    "kind", ["Stateful", *(pytest.param(kind, marks=pytest.mark.thorough) for kind in ("Walk", "Split"))]
)
def test_a_stream_goes_on(kind: str, tmp_path: Path) -> None:
    """Rank 0 is lost in mid-epoch: a stream that saves its position, one that is read again, and parts of a stream."""
    words = (*stream(tmp_path, f"streams.{kind}", "batch_size=12", *LOGGED), "threads=1")
    whole = run(tmp_path / "whole", 1, *words)
    with before_each_step(kills(0, 5)):
        elastic = ("parallel=ddp", "elastic_every_steps=2", "loader.num_workers=1")
        ended = Ranks(tmp_path / "out", 3, *words, *elastic).start().finish(killed=[0])
    assert_equal(ended, whole)
    assert_same_samples(ended, whole)


@pytest.mark.thorough
def test_checkpoints_leave_out_frozen_weights_after_a_loss(tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="needs the extra lora")
    files = write_files(tmp_path, gpt)
    words = (*GPT_WORDS, *files.words, f"init_from={files.base}", "threads=1", "elastic_every_steps=1")
    with before_each_step(kills(0, 2)):
        ended = Ranks(tmp_path / "out", 2, *words, "parallel=zero").start().finish(killed=[0])
    whole = run(tmp_path / "whole", 1, *words[:-1])
    assert_equal(ended, whole)
    assert ended.weights.keys() == whole.weights.keys()
    assert ended.saved.facts["base"] == whole.saved.facts["base"]


@pytest.mark.thorough
def test_optimizers_of_several_losses(tmp_path: Path) -> None:
    folder = Path(__file__).parents[1] / "experiments" / "adversarial"
    experiment = (f"--config-dir={folder}", "experiment=adversarial", "epochs=2", "batch_size=10", "logger=none")
    words = (*experiment, "precision=fp64", "threads=1")
    whole = run(tmp_path / "whole", 1, *words)
    with before_each_step(kills(1, 7)):
        elastic = ("parallel=zero", "elastic_every_steps=2")
        ended = Ranks(tmp_path / "out", 2, *words, *elastic).start().finish(killed=[1])
    assert_equal(ended, whole)


def test_a_step_that_is_applied_twice_is_found(whole: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep = StateCopies.before_step

    def keep_older_position(self: StateCopies, state: Any) -> None:
        keep(self, state)
        assert self.world.membership is not None
        copy = self.world.membership.copies[-1]
        if state.step:
            position = replace(state, step=state.step - 1)
            older = replace(copy, step=state.step - 1, content=replace(copy.content, state=position))
            self.world.membership.copies[-1] = older

    monkeypatch.setattr(StateCopies, "before_step", keep_older_position)
    ended = run_without_rank_1(tmp_path / "out", "ddp")
    with pytest.raises(AssertionError):
        assert_equal(ended, whole)


@pytest.mark.fault("SIGTERM after a rank was lost", outcome="survived")
def test_a_signal_after_a_loss(whole: Run, tmp_path: Path) -> None:
    def act(trainer: Trainer, batch: Any) -> None:
        kills(1, 10)(trainer, batch)
        if trainer.state.step == 15:
            os.kill(os.getpid(), signal.SIGTERM)

    with before_each_step(act):
        ranks = Ranks(tmp_path / "out", 2, *ELASTIC, *STATEFUL, "parallel=ddp").start()
        ranks.wait()
    (path,) = (tmp_path / "out" / "run").iterdir()
    assert Run(path).result["state"] == "preempted"
    assert all_sound(path / "checkpoints")[-1] == "step_16"
    assert_equal(run(tmp_path, 2, f"resume={path}", "elastic_every_steps=null"), whole)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("parallel=fsdp",), "elastic_every_steps=1 needs a mode in which each rank has all parameters; try parallel"),
        (("sync_batchnorm=false",), "elastic_every_steps=1 does not work with sync_batchnorm=false, because"),
        (("elastic_every_steps=0",), "elastic_every_steps=0 must be at least 1"),
    ],
)
def test_refused(words: Sequence[str], message: str, tmp_path: Path) -> None:
    with pytest.raises((InputError, RankError), match=message):
        run(tmp_path, 2, *ELASTIC, "parallel=ddp", *words)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("parallel=ddp",), "does not work with launcher=env, which ends all ranks if one is lost"),
        (("launcher=spawn", "micro_batches=auto"), "does not work with parallel=auto or micro_batches=auto"),
        (("launcher=spawn", "parallel=auto"), "does not work with parallel=auto or micro_batches=auto"),
        (
            ("launcher=torchrun", "launcher.nodes=2", "launcher.rdzv_endpoint=host:29400", "outputs=s3://bucket/runs"),
            "and outputs=s3://bucket/runs work together only on one machine",
        ),
    ],
)
def test_refused_by_the_command(
    words: Sequence[str], message: str, here: Callable[..., int], capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert here("elastic_every_steps=1", *words) == 2
    assert message in capfd.readouterr().err
    assert not (tmp_path / "outputs").exists()
