"""How a Slurm job ends, as its script's last command: a run that was told to stop goes back into the queue.

usage: python -m runner.launchers.requeue RUN_DIR STATUS SIGNAL, where SIGNAL is empty if the script received none
"""

import json
import os
import subprocess
import sys
from pathlib import Path

from runner.progress import available
from runner.run_dir import CHECKPOINTS, RESULT, read_result, write_whole

REQUEUED = Path("slurm") / "requeued.json"


def main() -> int:
    """Queue the job again where its run has been told to stop and has got on since the last time."""
    directory, status, signalled = Path(sys.argv[1]), int(sys.argv[2]), bool(sys.argv[3])
    result = read_result(directory) or {"state": "running"}
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
    job = os.environ["SLURM_JOB_ID"]  # a task of an array has one of its own
    print(f"stopped after step {step}: job {job} goes back into the queue", flush=True)
    return 143 if subprocess.run(["scontrol", "requeue", job], check=False).returncode == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
