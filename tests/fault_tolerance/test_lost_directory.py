"""A world that another has taken for dead changes nothing of the run that is the other's now."""

from pathlib import Path

import pytest
import torch

from runner.errors import JobFailed
from runner.fault_tolerance import checkpoint
from runner.fault_tolerance.writers import Writers
from runner.runs.run_directory import RunDirectory
from runner.runs.train_state import TrainState
from runner.training.saved_state import HeldState, Piece


class Lost:
    def is_lost(self) -> bool:
        return True


@pytest.fixture
def lost(tmp_path: Path) -> RunDirectory:
    directory = RunDirectory(tmp_path)
    directory._holder = Lost()  # type: ignore[assignment]
    return directory


def test_no_checkpoint_is_put_in_its_place(lost: RunDirectory) -> None:
    """Nor is the folder of the same name removed, in which the other world may be writing."""
    held = HeldState({"model.a": Piece.of(torch.ones(4))})
    state = TrainState(30, 0, 30, 1)
    path = checkpoint.save(lost.checkpoints, held, state, Writers())
    before = (path / "manifest.json").read_text()
    held.pieces["model.a"].tensor.fill_(2)
    with pytest.raises(JobFailed, match=r"^[^\n]* has been taken over by another process[^\n]*$"):
        checkpoint.save(lost.checkpoints, held, state, Writers(), lost.check_held)
    assert (path / "manifest.json").read_text() == before
    assert path.with_name("step_30.tmp").exists()
    checkpoint.sweep(lost.checkpoints)  # as the other world does when it begins


def test_no_line_is_logged(lost: RunDirectory) -> None:
    with pytest.raises(JobFailed, match="has been taken over by another process"):
        lost.log_metrics(1, 0, {})
    assert not (lost.path / "metrics.jsonl").exists()
