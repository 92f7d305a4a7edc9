"""When a Slurm job goes back into the queue: decided from what its run left."""

import json
import logging
import os
import signal
import socket
import sys
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from runner.distributed.hung_rank import ENDED
from runner.launchers.slurm import agent, requeue


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
    ("state", "status", "told", "expected"),
    [
        ("finished", 0, "", 0),
        ("finished", 1, "yes", 0),  # told to stop as it ended
        ("failed", 1, "", 1),
        ("failed", 1, "yes", 1),
        ("running", 137, "", 137),  # killed, by nobody who asks for more
        ("running", 0, "", 1),
        ("running", 1, "yes", 143),  # told before the loop could hear it
        ("preempted", 1, "yes", 143),
        ("preempted", 1, "", 143),  # told by its own signal, to a rank
        (None, 1, "yes", 143),
        (None, 1, "", 1),
    ],
)
def test_a_job_goes_back_only_where_it_was_told_to_stop(
    state: str | None,
    status: int,
    told: str,
    expected: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert end(monkeypatch, tmp_path / "run", state, 0 if state is None else 5, status, told) == expected


def test_a_job_that_gets_nowhere_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    statuses = [end(monkeypatch, tmp_path / "run", "preempted", step, 1, "yes") for step in (5, 9, 9)]
    assert statuses == [143, 143, 1]
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["state"] == "failed"
    assert result["error"].startswith("requeued at step 9 and stopped again without one step more")


def test_it_was_told_where_an_agent_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm preempts with a signal to the tasks, and ranks that are only starting die of it."""
    run = tmp_path / "run"
    assert end(monkeypatch, run, None, 0, 0, "") == 1
    (run / "slurm" / "told").touch()
    (run / "result.json").unlink()
    assert end(monkeypatch, run, None, 0, 0, "") == 143


def test_an_agent_that_a_signal_ends_leaves_a_file_and_no_noise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def main() -> None:
        log = logging.getLogger(agent.RENDEZVOUS)
        log.warning("The node 'n2_1_0' has failed to shutdown the rendezvous '7' due to an error of type E.")
        log.warning("something else")
        raise SignalException("told", sigval=signal.SIGUSR1)

    (tmp_path / "slurm").mkdir()
    monkeypatch.setattr(agent, "main", main)
    monkeypatch.setenv("RUNNER_DIRECTORY", str(tmp_path))
    assert agent.run() == 0
    assert (tmp_path / requeue.TOLD).exists()
    assert caplog.messages == ["something else"]


@pytest.mark.parametrize(
    ("exit_code", "told", "line"),
    [
        (3, "", "died: exit status 3\n"),
        (-9, "a loss", "died: SIGKILL\n"),
        (1, "a loss", ""),
        (-9, f"it hangs; {ENDED}", ""),
    ],
)
def test_an_agent_tells_of_a_rank_what_nobody_has_told(
    exit_code: int,
    told: str,
    line: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    def main() -> None:
        if told:
            (tmp_path / "result.json").write_text(json.dumps({"state": "failed", "error": told}))
        raise ChildFailedError("ranks", {1: ProcessFailure(1, 12345, exit_code, "")})

    monkeypatch.setattr(agent, "main", main)
    monkeypatch.setenv("RUNNER_DIRECTORY", str(tmp_path))
    assert agent.run() == 1
    said = capfd.readouterr().err
    assert said == (f"rank 1 on {socket.gethostname()} {line}" if line else "")


def test_a_run_that_could_not_say_why_has_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what an earlier start had to say is kept."""
    run = tmp_path / "run"
    assert end(monkeypatch, run, "running", 5, 137, "") == 137
    result = json.loads((run / "result.json").read_text())
    assert (result["state"], result["step"]) == ("failed", 5)
    assert result["error"] == "the job ended with status 137 before its run could say why"


def test_what_an_earlier_start_left_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    assert end(monkeypatch, run, "finished", 5, 0, "") == 0
    os.utime(run / "result.json", (1, 1))
    (run / "slurm" / "started").touch()
    assert end(monkeypatch, run, None, 0, 1, "") == 1, "it died before it came to write anything"
