"""What is found out of a rank that says nothing, by another one on its machine or by itself, and its end."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from runner.distributed.neighbours import kill
from runner.distributed.rank_trace import RankProcess, state_of, take_stacks, where_is
from runner.distributed.stack_text import main_first, place_in, shown, waits

STACKS_S = 2.0  # for a hung rank, to answer with its stacks
ENDED, STOPPED = "it was ended with SIGKILL", ", stopped by a signal"


@dataclass(frozen=True)
class Answer:
    """A line that names the rank; its stacks as they are shown; whether it waits for others and is not the cause."""

    line: str
    stacks: str = ""
    is_waiting: bool = False

    def dump(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def load(text: str) -> "Answer":
        return Answer(**json.loads(text))


def ask_and_end(process: RankProcess, timeout_s: float, kept_in: Path | None) -> Answer:
    """Ask a silent rank of this machine for its stacks, and end it: nothing else frees whoever waits for it.

    kept_in: the folder that the stacks are written into.
    """
    name, state = f"rank {process.rank} on {process.host}", state_of(process)
    if state == "gone":
        return Answer(f"no word from {name}: its process {process.pid} has ended")
    where, since_s = where_is(process)
    stacks = take_stacks(process, STACKS_S)
    kill(process)
    where = describe(where, since_s) + (STOPPED if state == "stopped" else "")
    return answer_of(process.rank, process.host, timeout_s, where, stacks, kept_in, ENDED)


def end_stopped(process: RankProcess, timeout_s: float) -> str:
    """End a rank of this machine that a signal has stopped, and do not wake it: it would tell what it missed meanwhile.

    Returns a line that names it.
    """
    where = describe(*where_is(process))
    kill(process)
    return f"{_no_word(process.rank, process.host, timeout_s, where)}{STOPPED}; {ENDED}"


def answer_of(
    rank: int, host: str, timeout_s: float, where: str, stacks: str, kept_in: Path | None, end: str
) -> Answer:
    """What a silent rank's stacks say. where: what it said itself; end: how it is ended."""
    name, is_waiting = f"rank {rank} on {host}", waits(stacks)
    line = _no_word(rank, host, timeout_s, where)
    if not stacks:
        return Answer(f"{line}, and it did not answer with its stacks; {end}")
    line += f", it {'waits for others' if is_waiting else 'hangs'} at {place_in(stacks)}"
    if kept_in is not None and (path := keep(stacks, kept_in, rank)):
        line += f"; its stacks are in {path}"
    return Answer(f"{line}; {end}", f"stacks of {name}, the innermost call first:\n{shown(stacks)}", is_waiting)


def _no_word(rank: int, host: str, timeout_s: float, where: str) -> str:
    return f"no word from rank {rank} on {host} within backend.timeout_s={timeout_s:g}: {where}"


def describe(where: str, since_s: float) -> str:
    """As `in step 12 for 20 s`."""
    return f"in {where or 'an unknown place'} for {since_s:.0f} s"


def keep(stacks: str, folder: Path, rank: int) -> Path | None:
    """Write a hung rank's stacks where the run keeps what its ranks say. Returns the file, if it could be written."""
    path = folder / f"rank_{rank}.stacks.txt"
    try:
        folder.mkdir(exist_ok=True)
        path.write_text(main_first(stacks) + "\n")
    except OSError:
        return None
    return path
