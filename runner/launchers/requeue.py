"""How a Slurm job ends, near the end of its script: whether a run that was told to stop goes back into the queue.

usage: python -m runner.launchers.requeue RUN_DIR STATUS SIGNAL, where SIGNAL is empty if the script received none
"""

import json
import sys
from pathlib import Path
from typing import Any

from runner.progress import available
from runner.run_dir import CHECKPOINTS, RESULT, read_result, write_whole

STARTED = Path("slurm") / "started"  # touched by the script before each start
REQUEUED = Path("slurm") / "requeued.json"
AGAIN = 143


def main() -> int:
    """The job's exit status; AGAIN where it was told to stop and has got on since the last time."""
    directory, status, signalled = Path(sys.argv[1]), int(sys.argv[2]), bool(sys.argv[3])
    result = _result_of_this_start(directory)
    if result["state"] == "finished":
        return 0
    if result["state"] != "preempted" and not (signalled and result["state"] == "running"):
        return status or 1
    before, checkpoints = directory / REQUEUED, available(directory / CHECKPOINTS)
    step = int(checkpoints[-1].name.removeprefix("step_")) if checkpoints else 0
    last = json.loads(before.read_text())["step"] if before.exists() else -1
    if step <= last:
        error = f"requeued at step {last} and stopped again without one step more; give the job more time"
        print(error, flush=True)
        write_whole(directory / RESULT, json.dumps({**result, "state": "failed", "error": error}, indent=1) + "\n")
        return 1
    write_whole(before, json.dumps({"step": step}) + "\n")
    print(f"stopped after step {step}", flush=True)
    return AGAIN


def _result_of_this_start(directory: Path) -> dict[str, Any]:
    """result.json, unless it is from before this start of the job: then the run has not come to write it."""
    result, started = read_result(directory), directory / STARTED
    if result is None or (started.exists() and (directory / RESULT).stat().st_mtime_ns < started.stat().st_mtime_ns):
        return {"state": "running"}
    return result


if __name__ == "__main__":
    sys.exit(main())
