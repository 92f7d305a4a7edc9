"""Which files are of a checkpoint, where other processes write in its folder too."""

import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from runner.errors import JobFailed
from runner.fault_tolerance import checkpoint, seen
from runner.fault_tolerance.shard_file import write_shard
from runner.fault_tolerance.writers import Writers
from runner.runs.train_state import TrainState
from runner.training.saved_state import HeldState, Piece, SavedState

STATE = TrainState(30, 0, 30, 1)


def test_what_the_manifest_does_not_list_is_not_read(tmp_path: Path) -> None:
    held = HeldState({"model.a": Piece.of(torch.ones(4))})
    stale = {"model.a": Piece(torch.full((2,), 7.0), (2,))}
    (tmp_path / "step_30.tmp").mkdir()
    write_shard(tmp_path / "step_30.tmp" / "rank_3.safetensors", stale)
    path = checkpoint.save(tmp_path, held, STATE, Writers())
    assert not (path / "rank_3.safetensors").exists()
    write_shard(path / "rank_3.safetensors", stale)  # it came later still
    checkpoint.verify(path)
    assert SavedState.open(path).model()["a"].tolist() == [1, 1, 1, 1]


def test_a_file_may_show_late_and_one_that_does_not_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a network file system, whose clients remember a folder."""
    partial = tmp_path / "run" / "checkpoints" / "partial"
    partial.mkdir(parents=True)
    (tmp_path / "late").write_bytes(b"123")
    late = threading.Timer(0.2, lambda: (tmp_path / "late").rename(partial / "rank_1.safetensors"))
    late.start()

    seen.check_seen(partial, {"rank_1.safetensors": {"size": 3}})
    late.join()
    monkeypatch.setattr(seen, "SEEN_WITHIN_S", 0.2)
    with pytest.raises(JobFailed, match=r"does not see rank_2.safetensors, .*; name a folder that all machines share"):
        seen.check_seen(partial, {"rank_2.safetensors": {"size": 3}})


def test_a_folder_that_is_renamed_meanwhile_has_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By rank 0, while another rank looks whether anything has grown there."""
    partial = tmp_path / "step_30.tmp"
    partial.mkdir()
    scan = os.scandir

    def rename_and_scan(path: Any) -> Any:
        if partial.exists():
            partial.rename(tmp_path / "step_30")
        return scan(path)

    monkeypatch.setattr(os, "scandir", rename_and_scan)
    monkeypatch.setattr(os, "listdir", lambda path: [entry.name for entry in rename_and_scan(path)])
    assert seen.sizes(partial) == {}
    assert (tmp_path / "step_30").exists()
