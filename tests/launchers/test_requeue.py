"""Whether a Slurm job is requeued, decided from the files of its run, and what its agents print."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from runner.launchers.slurm import agent, requeue, script
from runner.records.attempts import Attempt, append_attempt
from runner.records.interruptions import record_interruption

End = Callable[[str | None, int, int, str], int]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "run" / "slurm").mkdir(parents=True)
    return tmp_path / "run"


@pytest.fixture
def end(run: Path, monkeypatch: pytest.MonkeyPatch) -> End:
    """Return a function that returns the status of a job whose run has this state, and a checkpoint if step > 0."""

    def end(state: str | None, step: int, status: int, signaled: str) -> int:
        if step:
            (run / "checkpoints" / f"step_{step}").mkdir(parents=True, exist_ok=True)
        if state:
            (run / "result.json").write_text(json.dumps({"state": state, "step": step}))
        monkeypatch.setattr(sys, "argv", ["requeue", str(run), str(status), signaled])
        return requeue.main()

    return end


def result_of(run: Path) -> dict[str, object]:
    return json.loads((run / "result.json").read_text())


@pytest.mark.parametrize(
    ("state", "status", "signaled", "expected"),
    [
        ("finished", 0, "", 0),
        ("finished", 1, "yes", 0),  # the signal came at the end
        ("pruned", 0, "", 0),
        ("paused", 1, "yes", 0),
        ("failed", 1, "yes", 1),
        ("running", 0, "", 1),
        ("running", 1, "yes", 143),  # the signal came before the training loop
        ("preempted", 1, "yes", 143),
        ("preempted", 1, "", 143),  # only a rank received the signal
        (None, 1, "yes", 143),
    ],
)
def test_only_a_job_that_was_signaled_to_stop_is_requeued(
    state: str | None, status: int, signaled: str, expected: int, end: End
) -> None:
    assert end(state, 0 if state is None else 5, status, signaled) == expected


def test_a_job_that_was_killed_fails_and_its_result_keeps_the_rest(run: Path, end: End) -> None:
    assert end("running", 5, 137, "") == 137
    error = "the job ended with status 137 before its run recorded an outcome"
    assert result_of(run).items() >= {"state": "failed", "step": 5, "error": error}.items()


@pytest.mark.parametrize(("state", "signaled", "expected"), [("preempted", "", 137), ("regrouped", "yes", 143)])
def test_the_state_of_the_attempt_before_does_not_count(
    state: str, signaled: str, expected: int, run: Path, end: End
) -> None:
    """A run that has continued is killed: attempts.jsonl is newer than result.json, but has no end of this attempt."""
    (run / "result.json").write_text(json.dumps({"state": "running", "step": 5}))
    os.utime(run / "result.json", (1, 1))
    append_attempt(run, Attempt(1, state=state, first_step=0, step=5))
    record_interruption(run, attempt=2, step=5, elapsed_s=20.0, kept_s=10.0)
    assert end(None, 5, 137, signaled) == expected


def test_a_failed_start_keeps_the_outcome_of_a_finished_run(run: Path, end: End) -> None:
    end("finished", 5, 0, "")
    os.utime(run / "result.json", (1, 1))
    (run / "slurm" / "started").touch()  # after the result
    assert end(None, 5, 1, "") == 1
    assert result_of(run) == {"state": "finished", "step": 5}


def test_a_job_without_progress_since_the_last_requeue_fails(run: Path, end: End) -> None:
    assert [end("preempted", step, 1, "yes") for step in (5, 9, 9)] == [143, 143, 1]
    assert result_of(run)["state"] == "failed"
    assert str(result_of(run)["error"]).startswith("requeued at step 9 and stopped again before another step")


def test_a_job_is_requeued_if_only_its_agent_was_signaled(run: Path, end: End) -> None:
    """Slurm preempts with a signal to the tasks, and ranks that are starting die without a record."""
    assert end(None, 0, 0, "") == 1
    (run / "slurm" / "stopped").touch()
    (run / "result.json").unlink()
    assert end(None, 0, 0, "") == 143


def test_results_of_an_earlier_start_are_ignored(run: Path, end: End) -> None:
    assert end("finished", 5, 0, "") == 0
    os.utime(run / "result.json", (1, 1))
    (run / "slurm" / "started").touch()
    assert end(None, 0, 1, "") == 1


@pytest.mark.parametrize("ended", [143, SystemExit(143)])
def test_a_signaled_agent_leaves_a_file(run: Path, ended: int | SystemExit, monkeypatch: pytest.MonkeyPatch) -> None:
    def run_arguments(*arguments: object) -> int:
        if isinstance(ended, SystemExit):
            raise ended
        return ended

    monkeypatch.setattr(agent, "run_arguments", run_arguments)
    monkeypatch.setattr(sys, "argv", ["agent", "0", "1", "2", "node:1", "0", "60", "100"])
    monkeypatch.setenv("RUNNER_DIRECTORY", str(run))
    assert agent.main() == 0
    assert (run / requeue.STOPPED).exists()


@pytest.mark.parametrize(
    ("status", "first", "requeues"), [(75, "n1", 1), (75, "n2", 0), (1, "n1", 0)], ids=["lost", "reachable", "failed"]
)
def test_a_job_without_its_script_is_requeued(status: int, first: str, requeues: int, run: Path) -> None:
    """Two agents of n2 have lost the rendezvous on the node of the script; Slurm may have removed it from the job."""
    functions = script.FUNCTIONS.format(command="true", nproc=1, restarts=0, join_s=1, save_s=1)
    stubs = f"""
        agent() {{ return {status}; }}
        inside() {{ return 143; }}
        sleep() {{ :; }}
        squeue() {{ echo {first} n2; }}
        scontrol() {{
            case $1 in
            show) echo "$3" ;;
            --oneliner) echo JobState=RUNNING ;;
            requeue) echo "$2" >> "$RUNNER_DIRECTORY/requeues" ;;
            esac
        }}
        elastic_agent & elastic_agent; echo $?; wait
    """
    env = os.environ | {"RUNNER_DIRECTORY": str(run), "SLURM_JOB_ID": "7", "SLURM_NODEID": "1"}
    done = subprocess.run(
        ["bash", "-c", functions + script.ELASTIC + stubs], env=env, capture_output=True, text=True, timeout=120
    )
    assert done.stderr == "" and str(status) in done.stdout.splitlines()
    found = (run / "requeues").read_text() if (run / "requeues").exists() else ""
    assert found == "7\n" * requeues
