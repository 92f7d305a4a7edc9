"""A world that has failed is started again: as long as it gets on, and not where it fails in the same way twice."""

import re
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from runner.runs.attempts import read_attempts
from runner.runs.run_directory import CHECKPOINTS, read_result
from runner.runs.stand_in import written_at
from runner.runs.train_state import available, step_of


@dataclass(frozen=True)
class Start:
    """One start of a world that has failed. step: of the newest checkpoint that it began with, 0 for none."""

    step: int
    failure: str


class Restarts:
    """Whether a job's world may be started once more, each time that it has failed."""

    def __init__(self, max_restarts: int):
        self._max_restarts, self._starts = max_restarts, list[Start]()

    def refused(self, failure: str, began_at: int, directory: str | None, says: bool = True) -> str | None:
        """Why a world that failed, and began at this step, is not started again, in a line too; None: it is.

        says: that it is started again.
        """
        self._starts.append(Start(began_at, failure))
        reached = newest_step(directory)
        why = why_not_again(self._starts, reached, self._max_restarts)
        if why or says:
            with suppress(OSError):  # nobody reads it any more
                line = why or f"{_gist(failure)}: started again, from {_where(reached)}"
                print(line, file=sys.stderr, flush=True)
        return why


class Told:
    """What the ranks of the newest start have told of a failure, in the run's directory, once that is known."""

    def __init__(self, directory: Callable[[], str | None]):
        self.directory = directory
        self.begin()

    def begin(self) -> None:
        """What has been told until now is of an earlier start."""
        directory = self.directory()
        self._written = written_at(Path(directory)) if directory else None
        self._num_attempts = len(list(read_attempts(Path(directory)))) if directory else 0

    def failure(self) -> str:
        """Empty where they told nothing, or have no run directory here."""
        directory = self.directory()
        if directory is None:
            return ""
        result = read_result(Path(directory))
        if result and result.get("state") == "failed" and written_at(Path(directory)) != self._written:
            return result.get("error") or ""
        # One that failed before it had trained has left the record of the one before.
        errors = [attempt.error for attempt in read_attempts(Path(directory))][self._num_attempts :]
        return next((error for error in reversed(errors) if error), "")


def why_not_again(starts: Sequence[Start], step: int, max_restarts: int) -> str | None:
    """Why there is no further start after these, in order; None where there is. step: of the newest checkpoint now."""
    reached = [*(start.step for start in starts[1:]), step]
    got_on = [now > start.step for start, now in zip(starts, reached, strict=True)]
    ways = [_way(start.failure) for start in starts[-2:]]
    if len(ways) == 2 and not got_on[-1] and ways[0] == ways[1]:
        return f"not started again: it has failed twice in the same way, and got no further than {_where(step)}"
    # A start that got on is the first of those that count.
    since = len(starts) - max((number for number, on in enumerate(got_on) if on), default=0)
    if since > max_restarts:
        return f"not started again: launcher.max_restarts={max_restarts}, and it got no further than {_where(step)}"
    return None


def how_it_died(rank: int, exit_code: int) -> str:
    """A line about a rank of this machine that ended without a word."""
    how = signal.Signals(-exit_code).name if exit_code < 0 else f"exit status {exit_code}"
    return f"rank {rank} on {socket.gethostname()} died: {how}"


def newest_step(directory: str | None) -> int:
    """Of the newest checkpoint; 0 where there is none, or a shared folder cannot be read just now."""
    checkpoints: list[Path] = []
    with suppress(OSError):
        checkpoints = available(Path(directory) / CHECKPOINTS) if directory else []
    return step_of(checkpoints[-1]) if checkpoints else 0


def _gist(failure: str) -> str:
    """Which rank, and of what: the first line of what was told of it, and the last."""
    lines = failure.strip().splitlines()
    return " ".join(dict.fromkeys((lines[0], lines[-1].strip()))) if lines else ""


def _way(failure: str) -> str:
    """What is equal where the same fails again: then any rank may be first to say so, and its process is another."""
    lines = failure.strip().splitlines()
    if len(lines) > 1 and re.match(r"rank \d+ on ", lines[0]):
        lines = lines[1:]
    if lines and lines[0].startswith("Traceback"):
        while any(line.startswith(" ") for line in lines):  # of the calls; what was raised follows
            lines = lines[1:]
    return re.sub(r"\bprocess \d+", "process", "\n".join(lines))


def _where(step: int) -> str:
    return f"step {step}" if step else "the beginning"
