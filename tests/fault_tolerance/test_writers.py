"""No rank goes on to where it would miss rank 0, while that still writes a checkpoint."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from worlds import run

from runner.errors import JobFailed
from runner.fault_tolerance import checkpoint
from runner.fault_tolerance.writers import StoreGone, Writers
from runner.runs.manifest import Written
from runner.runs.train_state import TrainState, available
from runner.training.saved_state import HeldState, Piece


def test_it_waits_for_as_long_as_files_grow() -> None:
    writers, calls = Writers(1, 2, dist.HashStore()), []

    def grown() -> int:
        calls.append(0)
        if len(calls) == 20:
            writers.end(3)
        return len(calls)

    writers.wait_for_end(3, grown, 0.3)
    assert len(calls) == 20


def test_it_goes_on_where_rank_0_does_nothing_or_a_rank_has_failed() -> None:
    began = time.monotonic()
    writers = Writers(1, 2, dist.HashStore())
    writers.wait_for_end(3, lambda: 0, 0.1)
    writers.alarmed.set()
    writers.wait_for_end(3, lambda: 0, 600)
    assert time.monotonic() - began < 60


def test_rank_0_tells_also_where_it_gives_up(tmp_path: Path) -> None:
    store, held = dist.HashStore(), HeldState({"model.a": Piece.of(torch.ones(4))})
    store.set("1/1", '{"error": "its disk is full"}')
    with pytest.raises(JobFailed, match="its disk is full"):
        checkpoint.save(tmp_path, held, TrainState(1, 0, 1, 1), Writers(0, 2, store))
    assert store.check(["1/ended"])


def test_what_is_written_together_is_not_written_again_by_one_rank_alone() -> None:
    """Which has given up the one before, as the others have not."""
    assert not Writers(0, 2, dist.HashStore(), together=True).agree(is_last=True, gave_up=True)


def test_a_rank_whose_folder_rank_0_has_removed_tells_no_cause_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, held = dist.HashStore(), HeldState({"model.a": Piece.of(torch.ones(4))})

    def fails_on_rank_0_meanwhile(path: Path, pieces: dict[str, Piece]) -> Written:
        Writers(0, 2, store).drop(1)
        raise FileNotFoundError(path)

    monkeypatch.setattr(checkpoint, "write_shard", fails_on_rank_0_meanwhile)
    checkpoint.save(tmp_path, held, TrainState(1, 0, 1, 1), Writers(1, 2, store))
    assert not store.check(["1/1"])


class Lost(Writers):
    """Writers whose store goes while this rank writes."""

    def is_dropped(self, step: int) -> bool:
        raise StoreGone("nobody answers")

    def hear(self, step: int, grown: Callable[[], object]) -> list[dict[str, Any]]:
        raise StoreGone("nobody answers")


def test_a_rank_that_has_lost_the_store_removes_nothing_that_rank_0_writes_meanwhile(tmp_path: Path) -> None:
    held, state = HeldState({"model.a": Piece.of(torch.ones(4))}), TrainState(1, 0, 1, 1)
    partial = checkpoint.partial_of(tmp_path, state)
    partial.mkdir()
    (partial / "rank_0.safetensors").write_text("half of it")
    with pytest.raises(StoreGone):
        checkpoint.save(tmp_path, held, state, Lost(1, 2, dist.HashStore()))
    assert [path.name for path in partial.iterdir()] == ["rank_0.safetensors"]


def test_what_others_have_left_without_a_store_goes_with_the_next_one(tmp_path: Path) -> None:
    """Rank 0 has given it up and removed it, and another rank, which was later, has made the folder again."""
    held, state = HeldState({"model.a": Piece.of(torch.ones(4))}), TrainState(1, 0, 1, 1)
    for rank in (0, 1):
        with pytest.raises(StoreGone):
            checkpoint.save(tmp_path, held, state, Lost(rank, 2, dist.HashStore()))
    checkpoint.save(tmp_path, held, TrainState(2, 0, 2, 1), Writers(together=True))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["last", "step_2"]


def test_what_another_world_writes_in_the_folder_is_left(tmp_path: Path) -> None:
    def taken_over() -> None:
        raise RuntimeError("held by another")

    (theirs := tmp_path / "step_7.tmp").mkdir()
    held, state = HeldState({"model.a": Piece.of(torch.ones(4))}), TrainState(2, 0, 2, 1)
    with pytest.raises(RuntimeError, match="held by another"):
        checkpoint.save(tmp_path, held, state, Writers(together=True), taken_over)
    assert theirs.exists()


@pytest.mark.thorough
@pytest.mark.parametrize("options", [(), ("checkpoint.asynchronous=false",)])
def test_a_disk_that_is_slower_than_ranks_wait_for_each_other(
    options: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For twice as long rank 0's file grows, of a checkpoint in the middle and of the last one."""
    write_shard = checkpoint.write_shard

    def slowly(path: Path, pieces: dict[str, Piece]) -> Written:
        for _ in range(16 if path.parent.name in ("step_3.tmp", "step_8.tmp") else 0):
            with path.open("ab") as file:
                file.write(b"more")
            time.sleep(0.5)
        return write_shard(path, pieces)

    monkeypatch.setattr(checkpoint, "write_shard", slowly)
    words = ("model=mlp", "model.hidden=[16]", "data.sample_shape=[1,8,8]", "batch_size=200", "logger=none")
    whole = run(
        tmp_path, 2, *words, "parallel=ddp", "checkpoint.every_steps=3", "backend.timeout_s=4", "epochs=1", *options
    )
    assert available(whole.path / "checkpoints")[-1].name == "step_8"
