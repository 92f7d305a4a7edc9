"""Checkpoints that are written beside training: true to the moment they are of, in turn, and never lost in silence."""

import errno
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from commands import wait_until
from ranks import RankError
from worlds import Run, run

from runner.config.schema import Checkpoints
from runner.errors import JobFailed
from runner.fault_tolerance import checkpoint, points
from runner.fault_tolerance.background import Background, Snapshot
from runner.fault_tolerance.checkpoint import choose, open_checkpoint
from runner.fault_tolerance.checkpointing import Checkpointing
from runner.fault_tolerance.writers import Writers
from runner.runs.monitor import Monitor
from runner.runs.train_state import TrainState, available
from runner.training.saved_state import HeldState, Piece

WORDS = ("model=mlp", "model.hidden=[16]", "data.sample_shape=[1,8,8]", "batch_size=200", "logger=none", "epochs=2")
WORDS = (*WORDS, "optimizer=adamw", "checkpoint.every_steps=3", "checkpoint.keep=2", "checkpoint.keep_best=0")
POINTS = (
    *("save: begin", "save: shards written", "save: facts written", "save: manifest written", "save: before rename"),
    *("save: renamed", "save: end", "remove: begin", "remove: renamed", "remove: end"),
)


@pytest.mark.skipif(sys.platform != "linux", reason="a thread has a priority of its own on Linux")
def test_what_is_written_gives_way_to_training() -> None:
    def priority() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    own, seen, background = priority(), list[int](), Background()
    background.do(lambda: seen.append(priority()))
    assert background.wait(timeout_s=300)
    assert seen == [19] and priority() == own


@pytest.mark.fault("parameters changed while they are written", outcome="survived")
def test_what_is_written_is_what_was_there_when_it_was_asked_for(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """Into memory that is used again; of what has two names there is one copy."""
    weight = torch.zeros(300, 7)
    held = HeldState({"model.a": Piece.of(weight), "model.b": Piece.of(weight), "model.c": Piece.of(weight.t())})
    snapshot, background, may_write = Snapshot(), Background(), threading.Semaphore(0)

    def write(copy: HeldState, step: int) -> None:
        may_write.acquire(timeout=60)
        checkpoint.save(tmp_path, copy, TrainState(step, 0, step, 1), Writers())

    for step in range(1, 51):
        weight.fill_(step)
        copy = snapshot.of(held)
        assert copy.pieces["model.a"].tensor.data_ptr() == copy.pieces["model.b"].tensor.data_ptr()
        background.do(lambda copy=copy, step=step: write(copy, step))  # type: ignore[misc]
        weight.fill_(-1.0)
        may_write.release()
        background.wait()
        model = open_checkpoint(tmp_path / f"step_{step}").model()
        assert all(tensor.eq(step).all() for tensor in model.values())
        assert model["c"].shape == (7, 300)
    record_property("injected", 50)


def test_one_is_written_after_the_other_and_an_error_is_raised_once() -> None:
    background, done, gate = Background(), [], threading.Event()

    def fail() -> None:
        raise OSError("no disk")

    background.do(lambda: gate.wait(60))
    for number in range(3):
        background.do(lambda number=number: done.append(number))  # type: ignore[misc]
    assert done == [] and not background.wait(0.01)
    gate.set()
    assert background.wait(60) and done == [0, 1, 2]
    background.do(fail)
    with pytest.raises(OSError, match="no disk"):
        background.wait(60)
    background.do(lambda: done.append(3))
    assert background.wait(60) and done[-1] == 3


@pytest.mark.fault("a checkpoint cannot be written, on any rank", outcome="refused")
@pytest.mark.parametrize("rank", [0, 1])
def test_a_writer_that_fails_ends_the_run_within_a_step_and_is_named(
    rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_shard, tell, told = checkpoint.write_shard, Writers.tell, tmp_path / "told"

    def full(path: Path, pieces: dict[str, Piece]) -> object:
        if path.name == f"rank_{rank}.safetensors" and "step_6" in str(path):
            path.write_bytes(b"begun")
            if rank == 0:  # with which the run ends: rank 1 would be cut short
                wait_until(told.exists)
            raise OSError(errno.ENOSPC, "No space left on device")
        return write_shard(path, pieces)

    def tell_and_note(self: Writers, step: int, message: dict[str, Any]) -> None:
        tell(self, step, message)
        if step == 6:
            told.touch()

    monkeypatch.setattr(checkpoint, "write_shard", full)
    monkeypatch.setattr(Writers, "tell", tell_and_note)
    with pytest.raises(RankError):
        run(tmp_path, 2, *WORDS, "parallel=fsdp")
    (path,) = (tmp_path / "run").iterdir()
    failed = Run(path)
    assert failed.result["state"] == "failed"
    assert "step_6 could not be written: No space left on device" in failed.result["error"]
    assert "Traceback" not in failed.result["error"] and len(failed.result["error"].strip().splitlines()) <= 3
    assert [each.name for each in available(path / "checkpoints")] == ["step_3"]
    assert not list((path / "checkpoints").glob("*.tmp"))
    assert max(failed.losses) <= 8
    monkeypatch.undo()
    whole = run(tmp_path / "whole", 2, *WORDS, "parallel=fsdp")
    run(tmp_path, 2, f"resume={path}", f"outputs={tmp_path}")
    assert failed.result["weights_sha256"] == whole.result["weights_sha256"]


def test_a_disk_that_is_too_small_is_told_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = checkpoint.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(checkpoint.shutil, "disk_usage", lambda path: usage._replace(free=2**20))
    held = HeldState({"model.a": Piece.of(torch.zeros(2**20))})
    with pytest.raises(Exception, match=r"step_1 could not be written: 1.0 MiB are free, 4.1 MiB are needed"):
        checkpoint.save(tmp_path, held, TrainState(1, 0, 1, 1), Writers())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.fault("kill -9 at each point of a save and of a retention", outcome="survived")
@pytest.mark.parametrize("point", POINTS)
def test_killed_at_any_point_one_complete_checkpoint_is_there(
    point: str, whole: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the point's third time: two checkpoints are there, or one is being removed."""
    times = 1 if point.startswith("remove") else 3
    seen: list[str] = []

    def die(name: str) -> None:
        seen.append(name)
        if seen.count(point) == times:
            os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(points, "watchers", [die])
    with pytest.raises(RankError):
        run(tmp_path, 1, *WORDS)
    monkeypatch.undo()
    (path,) = (tmp_path / "run").iterdir()
    for each in available(path / "checkpoints"):
        assert choose(path / "checkpoints", each.name) == each
    assert int(available(path / "checkpoints")[-1].name.removeprefix("step_")) >= 6
    resumed = run(tmp_path, 1, f"resume={path}", f"outputs={tmp_path}")
    assert resumed.result["weights_sha256"] == whole.result["weights_sha256"]
    assert resumed.losses == whole.losses
    left = {each.name for each in (path / "checkpoints").iterdir()}
    assert left == {"last", "step_15", "step_16"}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run(tmp_path_factory.mktemp("whole"), 1, *WORDS)


def test_it_changes_no_number_at_whatever_moment(whole: Run, tmp_path: Path) -> None:
    """By the clock, which is rank 0's, a checkpoint after each step on all ranks."""
    plain = run(tmp_path / "plain", 1, *WORDS, "checkpoint.asynchronous=false")
    often = run(tmp_path / "often", 1, *WORDS, "checkpoint.every_steps=null", "checkpoint.every_seconds=1e-9")
    for other in (plain, often):
        assert other.result["weights_sha256"] == whole.result["weights_sha256"]
        assert [path.name for path in available(other.path / "checkpoints")] == ["step_15", "step_16"]
        assert all(torch.equal(other.weights[name], tensor) for name, tensor in whole.weights.items())
    two = run(
        tmp_path / "two", 2, *WORDS, "parallel=fsdp", "checkpoint.every_steps=null", "checkpoint.every_seconds=1e-9"
    )
    assert [path.name for path in available(two.path / "checkpoints")] == ["step_15", "step_16"]


def test_a_silent_rank_is_not_told_as_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held, state = HeldState({"model.a": Piece.of(torch.ones(4))}), TrainState(1, 0, 1, 1)
    with pytest.raises(JobFailed, match=r"^checkpoint \S+step_1: rank 1 wrote nothing of the checkpoint") as caught:
        checkpoint.save(tmp_path, held, state, Writers(0, 2, dist.HashStore(), timeout_s=0.1))
    assert caught.value.follows and "\n" not in str(caught.value)

    for number, advice in ((errno.EDQUOT, "keep fewer"), (errno.EROFS, "mend that, and resume")):

        def refuse(path: Path, pieces: object, number: int = number) -> None:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(checkpoint, "write_shard", refuse)
        with pytest.raises(JobFailed, match=advice):
            checkpoint.save(tmp_path, held, state, Writers())


def test_a_failed_rank_tells_why_before_the_others_give_up(tmp_path: Path) -> None:
    nothing: Any = None
    writers = Writers(timeout_s=0.3)
    checkpointing = Checkpointing(
        Checkpoints(), *[nothing] * 4, Monitor("val/loss", "min"), {}, nothing, nothing, writers
    )
    gate = threading.Event()
    checkpointing._background.do(lambda: gate.wait(60))
    began = time.monotonic()
    checkpointing.on_end(nothing, "failed")
    assert time.monotonic() - began < 30 and writers.given_up.is_set()
    gate.set()
    assert checkpointing._background.wait(60)
