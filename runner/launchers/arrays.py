"""Which jobs Slurm no longer has: asked once for a whole array, of which it may have forgotten some tasks."""

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence

from runner.launchers.queue import OVER, show


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
