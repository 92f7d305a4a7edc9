"""Slurm's queue, by its own commands: submission, and queries of jobs."""

import os
import re
import shutil
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NoReturn

from runner.distributed.failures.signals import INTERRUPTED, Stopped, interruptible
from runner.errors import InputError, JobFailed
from runner.launchers.protocol import SubmissionUnknown
from runner.records.result import read_result

ENDED = (
    *("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "PREEMPTED"),
    *("NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE", "REVOKED"),
)
JOB = Path("slurm") / "job"  # the file with the name of the directory's last job
QUERY_TIMEOUT_S, SBATCH_TIMEOUT_S = 60.0, 300.0
POLL_S = 1.0


def check_sbatch() -> None:
    """Raise InputError if this machine cannot submit jobs."""
    if shutil.which("sbatch") is None:
        raise InputError(
            "launcher=slurm needs sbatch, which is not on this machine; launcher.dry_run=true prints the script, and "
            "launcher=spawn runs here"
        )


def submit(script: str, directory: Path, name: str = "job.sh") -> str:
    """Save the script and submit it with sbatch. Return the job's id.

    Raises InputError if sbatch refuses it, and SubmissionUnknown if sbatch times out: Slurm may have accepted the job.
    """
    (directory / "slurm").mkdir(exist_ok=True)
    path = directory / "slurm" / name
    path.write_text(script)
    command = ["sbatch", "--parsable", str(path)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SBATCH_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        (directory / JOB).write_text(f"{path}\n")
        text = (
            f"launcher=slurm: sbatch did not answer within {SBATCH_TIMEOUT_S:g} s, and the job may be queued; "
            f"`squeue --me --format='%F %T %o'` lists it with {path} if it is, otherwise `sbatch {path}` submits it"
        )
        print(text, file=sys.stderr, flush=True)
        raise SubmissionUnknown(text, [str(path)]) from None
    if done.returncode:
        raise InputError(f"launcher=slurm: sbatch failed: {' '.join(done.stderr.split())}")
    job = done.stdout.strip().split(";")[0]  # a federation appends the cluster
    (directory / JOB).write_text(f"{job}\n")
    return job


def last_job(directory: Path) -> str | None:
    """Return the name of the job that was last submitted for the directory."""
    return (directory / JOB).read_text().strip() if (directory / JOB).exists() else None


def job_state(job: str) -> tuple[str, int]:
    """Return Slurm's name of the job's state and the job's exit status; a job that Slurm has forgotten is COMPLETED.

    Raises InputError if scontrol is missing.
    """
    states = _task_states(job)
    return ("UNKNOWN", 1) if states is None else states.get(job, ("COMPLETED", 0))


def find_ended(names: Sequence[str]) -> set[str]:
    """Return the jobs of these names that neither wait nor run; none for which Slurm does not answer.

    A name is a job (7), a task of a job array (7_3), or the path of a batch script if sbatch did not return the job's
    id. Raises InputError if a command of Slurm is missing.
    """
    ended: set[str] = set()
    scripts = {name for name in names if name.startswith("/")}
    if scripts and (output := _query("squeue", "--me", "--noheader", "--format=%o", job="; ".join(scripts))):
        ended |= scripts - set(output.stdout.splitlines()) if output.returncode == 0 else set()
    tasks: dict[str, set[str]] = defaultdict(set)
    for name in {*names} - scripts:
        tasks[name.partition("_")[0]].add(name)
    for job, members in tasks.items():
        states = _task_states(job)
        if states is None:  # a query for the next job would time out as well
            break
        ended |= {name for name in members if name not in states or states[name][0] in ENDED}
    return ended


def follow(job: str, directory: Path, log: Path) -> dict[str, float]:
    """Print the job's log until the job has ended; a requeued job has not. Return the run's metrics.

    Raises JobFailed if the run is not finished then.
    """
    state, status, offset = "PENDING", 1, 0
    try:
        with interruptible():
            while state not in ENDED:
                time.sleep(POLL_S)
                state, status = job_state(job)
                if log.exists():
                    with log.open(errors="replace") as file:
                        file.seek(offset)
                        print(file.read(), end="", flush=True)
                        offset = file.tell()
    except (KeyboardInterrupt, Stopped):
        leave_queued(job)
    result = read_result(directory) or {}
    if state == "COMPLETED" and result.get("state") == "finished":
        return result["metrics"]
    text = f"job {job} ended {state}, status {status}; its log is {log}"
    print(text, file=sys.stderr, flush=True)
    raise JobFailed(text, status or 1)


def leave_queued(*jobs: str) -> NoReturn:
    text = f"job {', '.join(jobs)} remains in the queue; `scancel {' '.join(jobs)}` ends it"
    print(f"\n{text}", file=sys.stderr, flush=True)
    raise SystemExit(INTERRUPTED)


def _task_states(job: str) -> dict[str, tuple[str, int]] | None:
    """Return state and exit status by name of the array's tasks that Slurm knows, or of the job.

    Returns None without an answer.
    """
    done = _query("scontrol", "--oneliner", "show", "job", job, job=job)
    if done is None or not ("JobState=" in done.stdout or "Invalid job id" in done.stderr):
        return None
    states = {}
    for line in done.stdout.splitlines():
        if state := re.search(r"\bJobState=(\w+)", line):
            status = re.search(r"\bExitCode=(\d+):", line)
            numbers = re.search(r"\bArrayTaskId=(\S+)", line)
            names = [f"{job}_{number}" for number in _expand(numbers[1])] if numbers else [job]
            states.update(dict.fromkeys(names, (state[1], int(status[1]) if status else 1)))
    return states


def _query(*command: str, job: str) -> subprocess.CompletedProcess[str] | None:
    """Run a command of Slurm; return None if it times out. Raises InputError, which names the job, if it is missing."""
    env = os.environ | {"SLURM_BITSTR_LEN": "0"}  # otherwise a long list of tasks is truncated
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=QUERY_TIMEOUT_S, check=False, env=env)
    except FileNotFoundError:
        raise InputError(
            f"job {job} is in Slurm's queue, but {command[0]} is missing here; run this command where it is installed"
        ) from None
    except subprocess.TimeoutExpired:
        return None


def _expand(tasks: str) -> Iterator[int]:
    """Yield the numbers of Slurm's short form: 0, 1, 2 and 7 for 0-2,7%4, where 4 limits the running tasks."""
    for part in tasks.partition("%")[0].split(","):
        first, _, last = part.partition("-")
        last, _, step = last.partition(":")
        yield from range(int(first), int(last or first) + 1, int(step or 1))
