"""Checkpoints written in the background: consistent, in order, and with errors reported."""

import errno
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from commands import wait_until
from ranks import RankError
from worlds import Run, run

from runner.checkpoints import save as saving
from runner.checkpoints.layout import TrainState, list_checkpoints
from runner.checkpoints.save_coordination import SaveCoordinator
from runner.checkpoints.saved_state import LocalState, open_checkpoint
from runner.checkpoints.shard_file import LocalChunk
from runner.checkpoints.snapshot import Snapshot
from runner.errors import JobFailed
from runner.records.background import BackgroundThread

WORDS = ("model=mlp", "model.hidden=[16]", "data.sample_shape=[1,8,8]", "batch_size=200", "logger=none", "epochs=2")
WORDS = (*WORDS, "optimizer=adamw", "checkpoint.every_steps=3", "checkpoint.keep=2", "checkpoint.keep_best=0")


@pytest.mark.skipif(sys.platform != "linux", reason="a thread has a priority of its own on Linux")
def test_the_writer_has_the_lowest_priority() -> None:
    def priority() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    own, seen, background = priority(), list[int](), BackgroundThread("checkpoint")
    background.submit(lambda: seen.append(priority()))
    assert background.wait(timeout_s=300)
    assert seen == [19] and priority() == own


@pytest.mark.fault("parameters changed while they are written", outcome="survived")
def test_a_checkpoint_has_the_values_at_the_time_of_the_request(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """The snapshot reuses its memory."""
    weight = torch.zeros(300, 7)
    held = LocalState({"model.a": LocalChunk.of(weight), "model.c": LocalChunk.of(weight.t())})
    snapshot, background, may_write = Snapshot(), BackgroundThread("checkpoint"), threading.Semaphore(0)

    def write(copy: LocalState, step: int) -> None:
        may_write.acquire(timeout=60)
        saving.save(tmp_path, copy, TrainState(step, 0, step, 1), SaveCoordinator())

    for step in range(1, 51):
        weight.fill_(step)
        copy = snapshot.of(held)
        background.submit(lambda copy=copy, step=step: write(copy, step))  # type: ignore[misc]
        weight.fill_(-1.0)
        may_write.release()
        background.wait()
        model = open_checkpoint(tmp_path / f"step_{step}").model()
        assert all(tensor.read().eq(step).all() for tensor in model.values())
        assert model["c"].shape == (7, 300)
    record_property("injected", 50)


def test_functions_run_in_order_and_an_error_is_raised_once() -> None:
    background, done, gate = BackgroundThread("checkpoint"), [], threading.Event()

    def fail() -> None:
        raise OSError("no disk")

    background.submit(lambda: gate.wait(60))
    for number in range(3):
        background.submit(lambda number=number: done.append(number))  # type: ignore[misc]
    assert done == [] and not background.wait(0.01)
    gate.set()
    assert background.wait(60) and done == [0, 1, 2]
    background.submit(fail)
    with pytest.raises(OSError, match="no disk"):
        background.wait(60)
    background.submit(lambda: done.append(3))
    assert background.wait(60) and done[-1] == 3


@pytest.mark.fault("a checkpoint cannot be written, on any rank", outcome="refused")
@pytest.mark.parametrize("rank", [0, 1])
def test_a_failed_write_ends_the_run_and_is_reported(
    rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_shard, report, reported = saving.write_shard, SaveCoordinator.report, tmp_path / "reported"

    def full(path: Path, pieces: dict[str, LocalChunk]) -> object:
        if path.name == f"rank_{rank}.safetensors" and "step_6" in str(path):
            path.write_bytes(b"begun")
            if rank == 0:  # its failure ends the run, which must not interrupt rank 1
                wait_until(reported.exists)
            raise OSError(errno.ENOSPC, "No space left on device")
        return write_shard(path, pieces)

    def report_and_note(self: SaveCoordinator, step: int, message: dict[str, Any]) -> None:
        report(self, step, message)
        if step == 6:
            reported.touch()

    monkeypatch.setattr(saving, "write_shard", full)
    monkeypatch.setattr(SaveCoordinator, "report", report_and_note)
    with pytest.raises(RankError):
        run(tmp_path, 2, *WORDS, "parallel=fsdp")
    (path,) = (tmp_path / "run").iterdir()
    failed = Run(path)
    assert failed.result["state"] == "failed"
    assert "step_6 could not be written: No space left on device" in failed.result["error"]
    assert "Traceback" not in failed.result["error"] and len(failed.result["error"].strip().splitlines()) <= 3
    assert [each.name for each in list_checkpoints(path / "checkpoints")] == ["step_3"]
    assert not list((path / "checkpoints").glob("*.tmp"))
    assert max(failed.losses) <= 8


def test_asynchronous_saves_change_no_number(tmp_path: Path) -> None:
    """With `every_seconds` near 0, a checkpoint is saved after each step."""
    whole = run(tmp_path / "whole", 1, *WORDS)
    plain = run(tmp_path / "plain", 1, *WORDS, "checkpoint.asynchronous=false")
    often = run(tmp_path / "often", 1, *WORDS, "checkpoint.every_steps=null", "checkpoint.every_seconds=1e-9")
    for other in (plain, often):
        assert other.result["weights_sha256"] == whole.result["weights_sha256"]
        assert [path.name for path in list_checkpoints(other.path / "checkpoints")] == ["step_15", "step_16"]
        assert all(torch.equal(other.weights[name], tensor) for name, tensor in whole.weights.items())


def test_a_missing_rank_is_not_reported_as_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held, state = LocalState({"model.a": LocalChunk.of(torch.ones(4))}), TrainState(1, 0, 1, 1)
    with pytest.raises(JobFailed, match=r"^checkpoint \S+step_1: rank 1 wrote nothing of the checkpoint") as caught:
        saving.save(tmp_path, held, state, SaveCoordinator(0, 2, dist.HashStore(), timeout_s=0.1))
    assert caught.value.follows and "\n" not in str(caught.value)

    def refuse(path: Path, pieces: object) -> None:
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    monkeypatch.setattr(saving, "write_shard", refuse)
    with pytest.raises(JobFailed, match=r"Disk quota exceeded\n.*checkpoint.keep"):
        saving.save(tmp_path, held, state, SaveCoordinator())
