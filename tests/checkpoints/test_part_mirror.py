"""Tests of checkpoints whose files are on two machines, each with its mirror."""

import hashlib
import os
from pathlib import Path

import pytest

from runner.checkpoints.layout import FACTS, MANIFEST, PROGRESS, FileRecord, manifest_text
from runner.checkpoints.part_mirror import PartMirror
from runner.checkpoints.run_mirror import RunMirror
from runner.remote.address import Address
from runner.remote.object_lock import ObjectLock
from runner.remote.store import ObjectStore, StoreError

FILES = {FACTS: b"{}", PROGRESS: b"{}", "rank_0.safetensors": b"zero", "rank_1.safetensors": b"one"}


def write(checkpoint: Path, *names: str) -> None:
    """Write a checkpoint that lists all files, of which only some are on this machine."""
    checkpoint.mkdir(parents=True)
    for name in names:
        (checkpoint / name).write_bytes(FILES[name])
    records = {
        name: FileRecord(sha256=hashlib.sha256(text).hexdigest(), size=len(text)) for name, text in FILES.items()
    }
    (checkpoint / MANIFEST).write_text(manifest_text(records))


def open_mirror(store: ObjectStore, directory: Path) -> RunMirror:
    lock = ObjectLock(store, str(directory), os.getpid(), 10)
    lock.acquire()
    return RunMirror(store, directory, lock)


def names(store: ObjectStore) -> list[str]:
    return [each.path for each in store.list()]


def test_a_checkpoint_is_complete_when_each_machine_has_uploaded_its_files(tmp_path: Path) -> None:
    store = ObjectStore(Address.parse(f"file://{tmp_path}/store"))
    first, second = tmp_path / "first", tmp_path / "second"
    write(first / "checkpoints/step_4", *list(FILES)[:3])  # another machine did not complete it before a crash
    mirror = open_mirror(store, first)
    part = second / "checkpoints/step_8.tmp/rank_1.safetensors"
    part.parent.mkdir(parents=True)
    other = PartMirror(store, second)
    mirror.sync()
    assert not mirror.left() and names(store) == ["lock.json"]
    write(first / "checkpoints/step_8", *list(FILES)[:3])
    with pytest.raises(StoreError, match=r"step_8 waits for rank_1.safetensors of another"):
        mirror.sync()
    part.write_bytes(b"two")  # of an earlier attempt
    other.sync()
    assert other.left() == ["checkpoints/step_8.tmp/rank_1.safetensors"]
    part.write_bytes(b"one")
    other.sync()
    assert "checkpoints/step_8/rank_1.safetensors" in names(store) and not other.left()
    assert "checkpoints/step_8/manifest.json" not in names(store)
    mirror.sync()
    assert "checkpoints/step_8/manifest.json" in names(store) and "wanted.json" not in names(store)
    with pytest.raises(StoreError, match="has not completed the last checkpoint"):
        other.sync(is_last=True)
    mirror.close()
    other.sync(is_last=True)
    assert not part.exists() and "lock.json" not in names(store)
