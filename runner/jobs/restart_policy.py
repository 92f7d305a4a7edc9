"""When a failed world is restarted: while it makes progress, and not if it fails twice in the same way."""

import re
import signal
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from runner.checkpoints.layout import list_checkpoints, step_of
from runner.records.attempts import read_attempts
from runner.records.result import read_result, result_mtime_ns
from runner.records.run_directory import CHECKPOINTS


@dataclass(frozen=True)
class FailedStart:
    """One start of a world that has failed. `step` is that of the checkpoint that it began with, 0 for none."""

    step: int
    failure: str


class FailureReport:
    """What the ranks of a world that is about to start will report of a failure, in the run directory.

    directory: Returns the run directory, or None while it is unknown.
    """

    def __init__(self, directory: Callable[[], str | None]):
        self._directory = directory
        path = directory()
        self._written = result_mtime_ns(Path(path)) if path else None
        self._num_attempts = len(list(read_attempts(Path(path)))) if path else 0

    def read(self) -> str:
        """Return the reported failure; empty if there is none, or no run directory on this machine."""
        directory = self._directory()
        if directory is None:
            return ""
        result = read_result(Path(directory))
        if result and result.get("state") == "failed" and result_mtime_ns(Path(directory)) != self._written:
            return result.get("error") or ""
        # An attempt that failed before its first step leaves result.json unchanged.
        errors = [attempt.error for attempt in read_attempts(Path(directory))][self._num_attempts :]
        return next((error for error in reversed(errors) if error), "")


def refusal(starts: Sequence[FailedStart], step: int, max_restarts: int) -> str | None:
    """Return why there is no further start after these; None if there is. `step` is that of the newest checkpoint."""
    reached = [*(start.step for start in starts[1:]), step]
    has_progressed = [now > start.step for start, now in zip(starts, reached, strict=True)]
    causes = [_cause(start.failure) for start in starts[-2:]]
    if len(causes) == 2 and not has_progressed[-1] and causes[0] == causes[1]:
        return f"not restarted: it failed twice in the same way, without getting beyond {_name(step)}"
    # The last start that made progress is the first of those that count.
    num_starts = len(starts) - max((number for number, progress in enumerate(has_progressed) if progress), default=0)
    if num_starts > max_restarts:
        return f"not restarted: launcher.max_restarts={max_restarts} reached, without getting beyond {_name(step)}"
    return None


def describe_death(rank: int, exit_code: int) -> str:
    """Return a line about a rank of this machine that exited without a report."""
    how = signal.Signals(-exit_code).name if exit_code < 0 else f"exit status {exit_code}"
    return f"rank {rank} on {socket.gethostname()} died: {how}"


def newest_step(directory: str | None) -> int:
    """Return the step of the newest checkpoint; 0 if none exists or the file system does not respond."""
    checkpoints: list[Path] = []
    with suppress(OSError):
        checkpoints = list_checkpoints(Path(directory) / CHECKPOINTS) if directory else []
    return step_of(checkpoints[-1]) if checkpoints else 0


def describe_restart(failure: str, step: int) -> str:
    """Return a line with the failure's first line, which names the rank, and its last line, which names the error."""
    lines = failure.strip().splitlines()
    summary = " ".join(dict.fromkeys((lines[0], lines[-1].strip()))) if lines else ""
    return f"{summary}: restarted from {_name(step)}"


def _cause(failure: str) -> str:
    """Return the report without what differs between two identical failures: the rank, its process and the calls."""
    lines = failure.strip().splitlines()
    if len(lines) > 1 and re.match(r"rank \d+ on ", lines[0]):
        lines = lines[1:]
    if lines and lines[0].startswith("Traceback"):
        while any(line.startswith(" ") for line in lines):  # the calls precede the exception
            lines = lines[1:]
    return re.sub(r"\bprocess \d+", "process", "\n".join(lines))


def _name(step: int) -> str:
    return f"step {step}" if step else "the beginning"
