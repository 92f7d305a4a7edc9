"""The interruptions of a run: lost or joined ranks, failures and stops after which training has continued.

Each is a line of `attempts.jsonl`, written when training continues.
"""

import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from runner.records.attempts import ATTEMPTS, KILLED, read_attempts
from runner.records.run_files import append_json_lines, parse_json, read_lines
from runner.records.run_record import DONE

MAX_SHOWN = 5
NUMBERS = (int, float)
TYPES = {"attempt": (int,), "step": (int,), "cause": (str,), "lost_s": NUMBERS, "elapsed_s": NUMBERS}


@dataclass(frozen=True)
class Interruption:
    """The seconds lost are those between the moment at which the run first was where it continues, and that at which
    it continues there: the detection, the restart or regrouping, and the steps that are repeated.
    """

    attempt: int  # the one that continues the training
    step: int  # after which it continues
    cause: str
    lost_s: float
    elapsed_s: float  # all seconds of the run until then, as perf/goodput counts them

    def __str__(self) -> str:
        return f"step {self.step}: {self.cause} ({self.lost_s:.2f} s lost)"


def read_interruptions(directory: Path) -> Iterator[Interruption]:
    """Yield the interruptions in order, without damaged lines. Raise InputError for an unreadable file."""
    with suppress(FileNotFoundError):
        for line in read_lines(directory / ATTEMPTS):
            with suppress(ValueError, RecursionError):
                facts = parse_json(line)
                if isinstance(facts, dict) and all(type(facts.get(name)) in types for name, types in TYPES.items()):
                    yield Interruption(**{name: facts[name] for name in TYPES})


def describe_interruptions(directory: Path) -> str:
    """Return a line about the newest interruptions; empty if there are none."""
    found = [*read_interruptions(directory)]
    earlier = [f"{len(found) - MAX_SHOWN} earlier"] if len(found) > MAX_SHOWN else []
    return "; ".join([*earlier, *map(str, found[-MAX_SHOWN:])])


def record_interruption(
    directory: Path, attempt: int, step: int, elapsed_s: float, kept_s: float, cause: str = ""
) -> None:
    """Record that an attempt continues the training after `step`; do nothing if no attempt was interrupted before.

    elapsed_s: all seconds of the run. kept_s: those until it first was after `step`. cause: empty to read it from the
    record of the attempt that was interrupted.
    """
    earlier = [a for a in read_attempts(directory) if a.number < attempt]
    trained = [a for a in earlier if a.first_step is not None or a.state == KILLED]
    if not trained or trained[-1].state in DONE:
        return
    since = max([kept_s, *(each.elapsed_s for each in read_interruptions(directory))])
    lost_s = round(max(elapsed_s - since, 0.0), 3) if math.isfinite(since) else 0.0
    found = Interruption(attempt, step, cause or trained[-1].error or trained[-1].state, lost_s, round(elapsed_s, 3))
    append_json_lines(directory / ATTEMPTS, asdict(found))
