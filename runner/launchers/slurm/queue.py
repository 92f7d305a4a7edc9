"""Slurm's queue, by its own commands: submission, and queries of jobs."""

import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from runner.distributed.failures.signals import INTERRUPTED, Stopped, interruptible
from runner.errors import InputError, JobFailed
from runner.launchers.followed_log import FollowedLog
from runner.records.run_files import make_directory, read_bytes, readable, write_atomically
from runner.records.run_record import DONE, find_run

JOB = Path("slurm") / "job"  # the file with the id of the directory's last job
QUERY_TIMEOUT_S = 60.0
POLL_S = 1.0


def check_sbatch() -> None:
    """Raise InputError if this machine cannot submit jobs."""
    if shutil.which("sbatch") is None:
        raise InputError(
            "launcher=slurm needs sbatch, which is not on this machine; launcher.dry_run=true prints the job"
        )


def submit(script: str, directory: Path, name: str = "job.sh") -> str:
    """Save the script and submit it with sbatch. Return the job's id.

    Raises InputError if sbatch refuses it, and JobFailed if Slurm does not respond in time and may have accepted it.
    """
    make_directory(directory / "slurm")
    path = directory / "slurm" / name
    write_atomically(path, script)
    done = subprocess.run(["sbatch", "--parsable", str(path)], capture_output=True, text=True, check=False)
    if done.returncode:
        text = f"launcher=slurm: sbatch failed: {' '.join(done.stderr.split())}"
        if "timed out" not in text:
            raise InputError(text)
        text += f"; the job may be queued: `squeue --me --format='%F %T %o'` lists it with {path} if it is"
        print(text, file=sys.stderr, flush=True)
        raise JobFailed(text)
    job = done.stdout.strip().split(";")[0]  # a federation appends the cluster
    write_atomically(directory / JOB, f"{job}\n")
    return job


def last_job(directory: Path) -> str | None:
    """Return the id of the job that was last submitted for the directory, or None. Raises InputError if unreadable."""
    try:
        with readable(directory / JOB):
            return read_bytes(directory / JOB).decode().strip()
    except FileNotFoundError:
        return None


def query_ended(names: Sequence[str]) -> set[str]:
    """Return the named jobs (7) and tasks of arrays (7_3) that neither wait nor run, as `Queue.find_ended`."""
    jobs = ",".join(sorted({name.partition("_")[0] for name in names}))
    if not jobs:
        return set()
    command = ("squeue", "--noheader", "--array", "--format=%i", f"--jobs={jobs}")
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=QUERY_TIMEOUT_S, check=False)
    except FileNotFoundError:
        raise InputError(
            f"job {jobs} is in Slurm's queue, but squeue is missing here; run this command where it is installed"
        ) from None
    except subprocess.TimeoutExpired:
        return set()
    if done.returncode and "Invalid job id" not in done.stderr:  # Slurm deletes the records of old jobs
        return set()
    return {*names} - set(done.stdout.split())


def follow(job: str, directory: Path, log: Path) -> dict[str, float]:
    """Print the job's log until the job ends. Return the run's metrics; raise JobFailed if the run is not finished."""
    has_ended, followed = False, FollowedLog(log)
    try:
        with interruptible():
            while not has_ended:
                time.sleep(POLL_S)
                has_ended = bool(query_ended([job]))
                followed.print_new()
    except (KeyboardInterrupt, Stopped):
        leave_queued(job)
    state, status = _final_state(job)
    run = find_run(directory)
    if state == "COMPLETED" and run.state in DONE:
        return run.metrics
    text = f"job {job} ended {state}, status {status}; its log is {log}"
    print(text, file=sys.stderr, flush=True)
    raise JobFailed(text, status or 1)


def leave_queued(*jobs: str) -> NoReturn:
    text = f"job {', '.join(jobs)} remains in the queue; `scancel {' '.join(jobs)}` ends it"
    print(f"\n{text}", file=sys.stderr, flush=True)
    raise SystemExit(INTERRUPTED)


def _final_state(job: str) -> tuple[str, int]:
    """Return Slurm's name of an ended job's state and its exit status; COMPLETED and 0 if Slurm has deleted it."""
    command = ("scontrol", "--oneliner", "show", "job", job)
    output = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    found = re.search(r"\bJobState=(\w+).*\bExitCode=(\d+):", output)
    return (found[1], int(found[2])) if found else ("COMPLETED", 0)
