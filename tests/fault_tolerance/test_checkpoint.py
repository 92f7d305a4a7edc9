"""Checkpoints: complete or absent, and only read when they are what was written."""

from pathlib import Path

import pytest
import torch

from runner.fault_tolerance import checkpoint
from runner.runs.train_state import TrainState, available, read_train_state

STATE = {"model": {"weight": torch.arange(1000.0)}, "optimizer": {"state": {}}, "scaler": {}}


def progress(step: int) -> TrainState:
    return TrainState(step=step, epoch=1, step_in_epoch=step % 7, batch_size=64)


def test_what_was_saved_is_loaded(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path, STATE, progress(5))
    state, at = checkpoint.load(path)
    assert at == progress(5) == read_train_state(path)
    assert torch.equal(state["model"]["weight"], STATE["model"]["weight"])
    assert state["optimizer"] == STATE["optimizer"]


def test_newest_stay_and_order_is_by_number(tmp_path: Path) -> None:
    for step in (8, 9, 10, 100):
        checkpoint.save(tmp_path, STATE, progress(step))
    checkpoint.retain(tmp_path, keep=2, best=[8], newest=100)
    assert [path.name for path in available(tmp_path)] == ["step_8", "step_10", "step_100"]
    assert (tmp_path / "last").resolve().name == "step_100" and (tmp_path / "best").resolve().name == "step_8"
    (tmp_path / "step_11.tmp").mkdir()  # of a crash
    checkpoint.save(tmp_path, STATE, progress(101))
    checkpoint.retain(tmp_path, keep=1, best=[], newest=101)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["last", "step_101"]


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, STATE, progress(5))
    other = {**STATE, "model": {"weight": torch.ones(3)}}
    path = checkpoint.save(tmp_path, other, progress(5))
    assert checkpoint.load(path)[0]["model"]["weight"].tolist() == [1, 1, 1]
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["last", "step_5"]


def test_a_crash_inside_a_save_leaves_the_older_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint.save(tmp_path, STATE, progress(5))

    def crash(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(torch, "save", crash)
    with pytest.raises(KeyboardInterrupt):
        checkpoint.save(tmp_path, STATE, progress(6))
    assert [path.name for path in available(tmp_path)] == ["step_5"]
    assert (tmp_path / "last").resolve().name == "step_5"
    monkeypatch.undo()
    checkpoint.save(tmp_path, STATE, progress(6))
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["last", "step_5", "step_6"]


@pytest.mark.parametrize("name", [checkpoint.STATE, "progress.json", checkpoint.MANIFEST])
def test_damage_is_found_and_named(tmp_path: Path, name: str) -> None:
    path = checkpoint.save(tmp_path, STATE, progress(5))
    file = path / name
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with pytest.raises(ValueError, match=r"step_5.*damaged"):
        checkpoint.load(path)
    file.write_bytes(content[:-1])
    with pytest.raises(ValueError, match="damaged"):
        checkpoint.load(path)
    file.unlink()
    with pytest.raises(ValueError, match="damaged"):
        checkpoint.load(path)


def test_loading_runs_no_code_that_a_file_brings(tmp_path: Path) -> None:
    """The hashes are right, for whoever writes a file can write its hash: the loader itself must refuse."""
    sentinel = tmp_path / "ran"

    class Malicious:
        def __reduce__(self) -> tuple[object, ...]:
            return sentinel.touch, ()

    path = checkpoint.save(tmp_path, {"model": Malicious()}, progress(1))
    with pytest.raises(Exception, match="Weights only load failed"):
        checkpoint.load(path)
    assert not sentinel.exists()


def test_hash_is_of_names_and_bytes_in_a_fixed_order() -> None:
    a, b = torch.arange(4.0), torch.ones(2, dtype=torch.int64)
    one = checkpoint.weights_sha256({"a": a, "b": b})
    assert one == checkpoint.weights_sha256({"b": b, "a": a})
    assert one != checkpoint.weights_sha256({"a": b, "b": a})
    assert one != checkpoint.weights_sha256({"a": a.nextafter(torch.tensor(9.0)), "b": b})
    assert one == checkpoint.weights_sha256({"a": torch.stack([a, a], 1)[:, 0], "b": b})
    assert checkpoint.weights_sha256({"a": torch.tensor(1.0)}) != checkpoint.weights_sha256({"a": torch.tensor(2.0)})
