"""What Slurm says of the jobs in its queue, and which jobs of a sweep are submitted there together."""

import json
import os
import re
import subprocess
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from runner.errors import InputError

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
        raise InputError(f"job {job} is in Slurm's queue; type this where scontrol is") from None
    except subprocess.TimeoutExpired:
        return None
    return said.stdout if "JobState=" in said.stdout else "" if "Invalid job id" in said.stderr else None


def group_by_launcher(jobs: Sequence[tuple[Any, Any, Any]]) -> list[list[tuple[Any, Any, Any]]]:
    """Jobs, with their configurations in the second place, that ask for the same: one array takes no others."""
    groups: dict[str, list[tuple[Any, Any, Any]]] = {}
    for job in jobs:
        groups.setdefault(json.dumps(job[1].launcher, sort_keys=True, default=str), []).append(job)
    return list(groups.values())


def ended(names: Sequence[str]) -> set[str]:
    """Those of the jobs, as 7 or 7_3, that neither wait nor run; none of those that Slurm does not answer about.

    Raises InputError where Slurm cannot be asked.
    """
    tasks: dict[str, set[str]] = defaultdict(set)
    for name in names:
        tasks[name.partition("_")[0]].add(name)
    over: set[str] = set()
    for job, wanted in tasks.items():
        states = _states(job)
        if states is None:  # nor would it answer about the others
            break
        over |= {name for name in wanted if states.get(name, OVER[0]) in OVER}
    return over


def _states(job: str) -> dict[str, str] | None:
    """The state in Slurm's words of each task of an array that it knows, or of the job; None without an answer."""
    said = show(job)
    if said is None:
        return None
    states = {}
    for line in said.splitlines():
        if state := re.search(r"\bJobState=(\w+)", line):
            numbers = re.search(r"\bArrayTaskId=(\S+)", line)
            names = [f"{job}_{number}" for number in _expand(numbers[1])] if numbers else [job]
            states.update(dict.fromkeys(names, state[1]))
    return states


def _expand(tasks: str) -> Iterator[int]:
    """The numbers of Slurm's short form: 0-2,7%4 is 0, 1, 2 and 7, of which four may run at once."""
    for part in tasks.partition("%")[0].split(","):
        first, _, last = part.partition("-")
        last, _, step = last.partition(":")
        yield from range(int(first), int(last or first) + 1, int(step or 1))
