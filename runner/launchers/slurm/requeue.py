"""The end of a Slurm job, called by its script: decides whether a run that was stopped is requeued.

usage: python -m runner.launchers.slurm.requeue RUN_DIR STATUS SIGNAL, which is empty if the script received none
"""

import json
import sys
from pathlib import Path

from runner.checkpoints.layout import list_checkpoints, step_of
from runner.records.attempts import ATTEMPTS, KILLED, read_attempts
from runner.records.interruptions import read_interruptions
from runner.records.run_directory import CHECKPOINTS
from runner.records.run_files import dumps, write_atomically
from runner.records.run_record import DONE, RESULT, find_run

STARTED = Path("slurm") / "started"  # the script touches it before each start
STOPPED = Path("slurm") / "stopped"  # touched by an agent that received a signal, and removed before each start
REQUEUED = Path("slurm") / "requeued.json"
REQUEUE = 143


def main() -> int:
    """Return the job's exit status: REQUEUE if the run was stopped and has made a step since the previous requeue."""
    directory, status = Path(sys.argv[1]), int(sys.argv[2])
    signaled = bool(sys.argv[3]) or (directory / STOPPED).exists()
    state = _state_of_this_start(directory)
    if state in DONE:
        return 0
    if state == "running" and not signaled:
        return _fail(directory, f"the job ended with status {status} before its run recorded an outcome", status)
    if state not in ("running", "preempted"):
        return status or 1
    checkpoints, requeued = list_checkpoints(directory / CHECKPOINTS), directory / REQUEUED
    step = step_of(checkpoints[-1]) if checkpoints else 0
    if requeued.exists() and step <= (previous := json.loads(requeued.read_text())["step"]):
        text = f"requeued at step {previous} and stopped again before another step; give the job more time"
        return _fail(directory, text, 1)
    write_atomically(requeued, dumps({"step": step}) + "\n")
    print(f"stopped after step {step}", flush=True)
    return REQUEUE


def _fail(directory: Path, error: str, status: int) -> int:
    print(error, flush=True)
    run = find_run(directory)
    if run.state not in DONE:  # a failed start does not change the outcome of a run that had finished
        run.state, run.error = "failed", error
        run.save()
    return status or 1


def _state_of_this_start(directory: Path) -> str:
    """Return the state in the newest record of the run; "running" if the script was started after all records."""
    attempts, interruptions = [*read_attempts(directory)], [*read_interruptions(directory)]
    ended = attempts[-1].state if attempts and attempts[-1].state != KILLED else None
    if ended and interruptions and interruptions[-1].attempt > attempts[-1].number:  # the next attempt has continued
        ended = None
    states: dict[str | Path, str | None] = {
        ATTEMPTS: ended,  # an attempt without a step leaves result.json unchanged
        RESULT: run.state if (run := find_run(directory)).is_recorded else None,
        STARTED: "running",
    }
    recorded = [name for name, state in states.items() if state and (directory / name).exists()]
    newest = max(recorded, key=lambda name: (directory / name).stat().st_mtime_ns, default=STARTED)
    return str(states[newest])


if __name__ == "__main__":
    sys.exit(main())
