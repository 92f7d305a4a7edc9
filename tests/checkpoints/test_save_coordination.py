"""Ranks that save together: reports, failures of one rank or of the store, and files that appear late."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from commands import wait_until
from worlds import run

from runner.checkpoints import layout, retention
from runner.checkpoints import save as saving
from runner.checkpoints.layout import FileRecord, TrainState, list_checkpoints
from runner.checkpoints.save_coordination import SaveCoordinator, StoreLost
from runner.checkpoints.saved_state import LocalState, SavedState
from runner.checkpoints.shard_file import LocalChunk, write_shard
from runner.errors import JobFailed
from runner.records import run_lock
from runner.records.run_directory import RunDirectory

STATE = TrainState(1, 0, 1, 1)


@pytest.fixture
def local() -> LocalState:
    return LocalState({"model.a": LocalChunk.of(torch.ones(4))})


def test_waiting_continues_while_files_grow() -> None:
    coordinator, calls = SaveCoordinator(1, 2, dist.HashStore()), []

    def progress() -> int:
        calls.append(0)
        if len(calls) == 20:
            coordinator.announce(3, "ended")
        return len(calls)

    coordinator.wait_for_end(3, progress, 0.3)
    assert len(calls) == 20


def test_waiting_ends_without_progress_and_after_a_failure() -> None:
    start = time.monotonic()
    coordinator = SaveCoordinator(1, 2, dist.HashStore())
    coordinator.wait_for_end(3, lambda: 0, 0.1)
    coordinator.peer_failed.set()
    coordinator.wait_for_end(3, lambda: 0, 600)
    assert time.monotonic() - start < 60


def test_rank_0_announces_the_end_of_a_failed_save(tmp_path: Path, local: LocalState) -> None:
    store = dist.HashStore()
    store.set("1/1", '{"error": "its disk is full"}')
    with pytest.raises(JobFailed, match="its disk is full"):
        saving.save(tmp_path, local, STATE, SaveCoordinator(0, 2, store))
    assert store.check(["1/ended"])


def test_synchronous_saves_are_never_repeated() -> None:
    """One rank may have given up the previous save when the others have not."""
    assert not SaveCoordinator(0, 2, dist.HashStore(), synchronous=True).agree(is_last=True, gave_up=True)


def test_a_rank_does_not_report_its_error_after_rank_0_gave_up(
    tmp_path: Path, local: LocalState, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = dist.HashStore()

    def fail_after_rank_0(path: Path, chunks: dict[str, LocalChunk]) -> FileRecord:
        SaveCoordinator(0, 2, store).announce(1, "dropped")
        raise FileNotFoundError(path)

    monkeypatch.setattr(saving, "write_shard", fail_after_rank_0)
    saving.save(tmp_path, local, STATE, SaveCoordinator(1, 2, store))
    assert not store.check(["1/1"])


class WithoutStore(SaveCoordinator):
    """A coordinator whose store is lost during the save."""

    def is_aborted(self, step: int) -> bool:
        raise StoreLost("no answer")

    def collect(self, step: int, progress: Callable[[], object]) -> list[dict[str, Any]]:
        raise StoreLost("no answer")


def test_a_rank_without_the_store_removes_only_its_own_file(tmp_path: Path, local: LocalState) -> None:
    partial = saving.partial_of(tmp_path, STATE)
    partial.mkdir()
    (partial / "rank_0.safetensors").write_text("half of it")
    with pytest.raises(StoreLost):
        saving.save(tmp_path, local, STATE, WithoutStore(1, 2, dist.HashStore()))
    assert [path.name for path in partial.iterdir()] == ["rank_0.safetensors"]


def test_the_next_save_removes_what_a_lost_store_has_left(tmp_path: Path, local: LocalState) -> None:
    """Rank 0 has removed the directory, and a slower rank has created it again."""
    for rank in (0, 1):
        with pytest.raises(StoreLost):
            saving.save(tmp_path, local, STATE, WithoutStore(rank, 2, dist.HashStore()))
    saving.save(tmp_path, local, TrainState(2, 0, 2, 1), SaveCoordinator(synchronous=True))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["last", "step_2"]


def test_another_worlds_files_are_left_alone(tmp_path: Path, local: LocalState) -> None:
    def taken_over() -> None:
        raise RuntimeError("locked by another world")

    (theirs := tmp_path / "step_7.tmp").mkdir()
    with pytest.raises(RuntimeError, match="locked by another world"):
        saving.save(tmp_path, local, TrainState(2, 0, 2, 1), SaveCoordinator(synchronous=True), taken_over)
    assert theirs.exists()


@pytest.fixture
def lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunDirectory]:
    """A run directory that another world has taken over."""
    monkeypatch.setattr(run_lock, "HEARTBEAT_S", 0.01)
    directory = RunDirectory(tmp_path)
    directory.lock()
    (tmp_path / "holder-1.json").unlink()
    wait_until(lambda: directory._lock is not None and directory._lock.is_lost())
    yield directory
    directory.release()


def test_a_lost_run_directory_gets_no_checkpoint(lost: RunDirectory, local: LocalState) -> None:
    """The partial directory stays, because the other world may be writing to it."""
    path = saving.save(lost.checkpoints, local, STATE, SaveCoordinator())
    before = (path / "manifest.json").read_text()
    local.chunks["model.a"].tensor.fill_(2)
    with pytest.raises(JobFailed, match=r"^[^\n]* has been taken over by another process[^\n]*$"):
        saving.save(lost.checkpoints, local, STATE, SaveCoordinator(), lost.check_lock)
    assert (path / "manifest.json").read_text() == before
    assert path.with_name("step_1.tmp").exists()
    retention.remove_leftovers(lost.checkpoints)  # as the other world does when it starts


def test_files_that_the_manifest_does_not_list_are_not_read(tmp_path: Path, local: LocalState) -> None:
    (tmp_path / "step_1.tmp").mkdir()
    stale = {"model.a": LocalChunk(torch.full((2,), 7.0), (2,))}  # of an earlier world that was presumed dead
    write_shard(tmp_path / "step_1.tmp" / "rank_3.safetensors", stale)
    path = saving.save(tmp_path, local, STATE, SaveCoordinator())
    layout.verify(path)
    assert SavedState.open(path).model()["a"].read().tolist() == [1, 1, 1, 1]


def test_a_file_may_appear_late_and_an_invisible_one_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients of a network file system cache directories."""
    partial = tmp_path / "run" / "checkpoints" / "partial"
    partial.mkdir(parents=True)
    (tmp_path / "late").write_bytes(b"123")
    late = threading.Timer(0.2, lambda: (tmp_path / "late").rename(partial / "rank_1.safetensors"))
    late.start()
    saving.check_visible(partial, {"rank_1.safetensors": {"size": 3}})
    late.join()
    monkeypatch.setattr(saving, "VISIBLE_WITHIN_S", 0.2)
    with pytest.raises(JobFailed, match=r"does not see rank_2.safetensors, .*; use a directory that all machines"):
        saving.check_visible(partial, {"rank_2.safetensors": {"size": 3}})


@pytest.mark.thorough
@pytest.mark.parametrize("options", [(), ("checkpoint.asynchronous=false",)])
def test_a_slow_disk_does_not_time_out(
    options: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0's file grows for twice the timeout, in a checkpoint in the middle and in the last one."""

    def write_slowly(path: Path, chunks: dict[str, LocalChunk]) -> FileRecord:
        for _ in range(16 if path.parent.name in ("step_3.tmp", "step_8.tmp") else 0):
            with path.open("ab") as file:
                file.write(b"more")
            time.sleep(0.5)
        return write_shard(path, chunks)

    monkeypatch.setattr(saving, "write_shard", write_slowly)
    words = ("model=mlp", "model.hidden=[16]", "data.sample_shape=[1,8,8]", "batch_size=200", "logger=none")
    whole = run(
        tmp_path, 2, *words, "parallel=ddp", "checkpoint.every_steps=3", "backend.timeout_s=4", "epochs=1", *options
    )
    assert list_checkpoints(whole.path / "checkpoints")[-1].name == "step_8"
