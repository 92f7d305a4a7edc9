"""When a Slurm job goes back into the queue: decided from what its run left, with a scontrol that only takes notes."""

import json
import sys
from pathlib import Path

import pytest

from runner.launchers import requeue


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What scontrol was asked."""
    (tmp_path / "bin").mkdir()
    scontrol = tmp_path / "bin" / "scontrol"
    scontrol.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\n')
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    return tmp_path / "asked"


def end(monkeypatch: pytest.MonkeyPatch, run: Path, state: str | None, step: int, status: int, told: str) -> int:
    """The job's status, where its run has a checkpoint at the step, if any."""
    (run / "slurm").mkdir(parents=True, exist_ok=True)
    if step:
        (run / "checkpoints" / f"step_{step}").mkdir(parents=True, exist_ok=True)
    if state:
        (run / "result.json").write_text(json.dumps({"state": state, "step": step}))
    monkeypatch.setattr(sys, "argv", ["requeue", str(run), str(status), told])
    return requeue.main()


@pytest.mark.parametrize(
    ("state", "status", "told", "expected", "requeued"),
    [
        ("finished", 0, "", 0, False),
        ("finished", 1, "yes", 0, False),  # told to stop as it ended
        ("failed", 1, "", 1, False),
        ("failed", 1, "yes", 1, False),
        ("running", 137, "", 137, False),  # killed, by nobody who asks for more
        ("running", 0, "", 1, False),
        ("running", 1, "yes", 143, True),  # told before the loop could hear it
        ("preempted", 1, "yes", 143, True),
        ("preempted", 1, "", 143, True),  # told by its own signal, to a rank
        (None, 1, "yes", 143, True),
        (None, 1, "", 1, False),
    ],
)
def test_a_job_goes_back_only_where_it_was_told_to_stop(
    state: str | None,
    status: int,
    told: str,
    expected: int,
    requeued: bool,
    tmp_path: Path,
    asked: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert end(monkeypatch, tmp_path / "run", state, 0 if state is None else 5, status, told) == expected
    assert asked.exists() == requeued
    if requeued:
        assert asked.read_text() == "requeue 7\n"


def test_a_job_that_gets_nowhere_ends(tmp_path: Path, asked: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    statuses = [end(monkeypatch, tmp_path / "run", "preempted", step, 1, "yes") for step in (5, 9, 9)]
    assert statuses == [143, 143, 1]
    assert asked.read_text() == "requeue 7\n" * 2
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["state"] == "failed"
    assert result["error"].startswith("requeued at step 9 and stopped again without one step more")
