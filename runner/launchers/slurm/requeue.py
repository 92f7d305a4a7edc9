"""How a Slurm job ends, near the end of its script: whether a run that was told to stop goes back into the queue.

usage: python -m runner.launchers.slurm.requeue RUN_DIR STATUS SIGNAL [WHY]

SIGNAL is empty if the script received none, and WHY says why the run was not started
"""

import json
import sys
from pathlib import Path

from runner.runs.attempts import ATTEMPTS, KILLED, read_attempts
from runner.runs.ledger import DONE
from runner.runs.run_directory import CHECKPOINTS, RESULT, read_result, write_whole
from runner.runs.strict_json import dumps
from runner.runs.train_state import available

STARTED = Path("slurm") / "started"  # touched by the script before each start
TOLD = Path("slurm") / "told"  # by an agent, which a signal asked to end; the script removes it before each start
REQUEUED = Path("slurm") / "requeued.json"
AGAIN = 143


def main() -> int:
    """The job's exit status; AGAIN where it was told to stop and has got on since the last time."""
    directory, status, signalled = Path(sys.argv[1]), int(sys.argv[2]), bool(sys.argv[3])
    if why := " ".join(sys.argv[4:]):
        return _fail(directory, why, status)
    signalled = signalled or (directory / TOLD).exists()
    state = _state_of_this_start(directory)
    if state == "finished":
        return 0
    if state == "running" and not signalled:
        return _fail(directory, f"the job ended with status {status} before its run could say why", status)
    if state not in ("running", "preempted"):
        return status or 1
    before, checkpoints = directory / REQUEUED, available(directory / CHECKPOINTS)
    step = int(checkpoints[-1].name.removeprefix("step_")) if checkpoints else 0
    last = json.loads(before.read_text())["step"] if before.exists() else -1
    if step <= last:
        text = f"requeued at step {last} and stopped again without one step more; give the job more time"
        return _fail(directory, text, 1)
    write_whole(before, dumps({"step": step}) + "\n")
    print(f"stopped after step {step}", flush=True)
    return AGAIN


def _fail(directory: Path, error: str, status: int) -> int:
    print(error, flush=True)
    result = read_result(directory) or {}
    if result.get("state") not in DONE:  # what a run that was resumed has come to is not undone by this start
        write_whole(directory / RESULT, dumps({**result, "state": "failed", "error": error}, indent=1) + "\n")
    return status or 1


def _state_of_this_start(directory: Path) -> str:
    """As the run has told; running where it has told nothing since this start."""
    result, started = read_result(directory), _when(directory / STARTED)
    told = max(_when(directory / RESULT), started)
    ended = [attempt.state for attempt in read_attempts(directory)]
    if ended and ended[-1] != KILLED and _when(directory / ATTEMPTS) >= told:
        return ended[-1]  # one that came to no step leaves result.json as it was
    if result is None or _when(directory / RESULT) < started:
        return "running"
    return str(result["state"])


def _when(path: Path) -> int:
    """It was last written, in nanoseconds; 0 where it is not there."""
    return path.stat().st_mtime_ns if path.exists() else 0


if __name__ == "__main__":
    sys.exit(main())
