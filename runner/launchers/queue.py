"""Jobs in Slurm's queue, and which jobs of a sweep go there together."""

import json
import os
import re
import subprocess
from collections.abc import Sequence
from typing import Any

from runner.config import InputError

ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "PREEMPTED")
OVER = (*ENDED, "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE", "REVOKED")


def state_of(job: str) -> tuple[str, int]:
    """The job's state in Slurm's words, and its exit status; a job that Slurm has forgotten has ended."""
    said = show(job)
    state = re.search(r"\bJobState=(\w+)", said or "")
    status = re.search(r"\bExitCode=(\d+):", said or "")
    if state is None:
        return ("UNKNOWN", 1) if said is None else ("COMPLETED", 0)
    return state[1], int(status[1]) if status else 1


def show(job: str) -> str | None:
    """What Slurm says of the job, or of each task of an array, a line each; "" of one that it has forgotten.

    None without an answer. Raises InputError where Slurm cannot be asked.
    """
    words = ("scontrol", "--oneliner", "show", "job", job)
    whole = os.environ | {"SLURM_BITSTR_LEN": "0"}  # or a long list of tasks ends in dots
    try:
        said = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False, env=whole)
    except FileNotFoundError:
        raise InputError(f"job {job} is in Slurm's queue; go on where scontrol is") from None
    except subprocess.TimeoutExpired:
        return None
    return said.stdout if "JobState=" in said.stdout else "" if "Invalid job id" in said.stderr else None


def group_by_launcher(jobs: Sequence[tuple[Any, Any, Any]]) -> list[list[tuple[Any, Any, Any]]]:
    """Jobs, with their configurations in the second place, that ask for the same: one array takes no others."""
    groups: dict[str, list[tuple[Any, Any, Any]]] = {}
    for job in jobs:
        groups.setdefault(json.dumps(job[1].launcher, sort_keys=True, default=str), []).append(job)
    return list(groups.values())
