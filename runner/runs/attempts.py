"""Who has run in a run directory, when, what was changed, and how it ended: `attempts.jsonl`, only ever appended to."""

import getpass
import json
import os
import socket
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from runner.runs.strict_json import dumps

ATTEMPTS = "attempts.jsonl"
KILLED = "killed"  # the state of an attempt that could not say how it ended


@dataclass
class Attempt:
    """One world's time in the directory: a line, written when it has ended. Of a killed one the next writes it."""

    number: int
    host: str
    user: str
    pid: int  # of the rank that writes
    started: str  # in UTC, as 2026-11-22T06:18:30+00:00
    ended: str | None = None  # of a killed one, when it was last seen
    state: str = "running"  # finished, failed, preempted or pruned, as in result.json, or killed
    world_size: int = 1
    parallel: str = ""
    first_step: int | None = None  # the step after which it went on; null where it had not come to train
    step: int | None = None  # that it has reached
    changed: dict[str, list[Any]] = field(default_factory=dict)  # by key: when the run began, and in this attempt
    error: str | None = None  # its last line


def begin_attempt(number: int, **facts: Any) -> Attempt:
    """Of this process, from now on."""
    return Attempt(number, socket.gethostname(), _user(), os.getpid(), now(), **facts)


def read_attempts(directory: Path) -> Iterator[Attempt]:
    """Those that have ended, in order; a line that a crash cut short, or that is none of ours, is passed over."""
    try:
        lines = (directory / ATTEMPTS).read_text(errors="replace").splitlines()
    except OSError:
        return
    for line in lines:
        try:
            attempt = attempt_of(json.loads(line))
        except (ValueError, RecursionError):
            continue
        if attempt is not None:
            yield attempt


def attempt_of(facts: Any) -> Attempt | None:
    """Of what was read; None where that is not what was written."""
    try:
        attempt = Attempt(**facts)
    except TypeError:
        return None
    changed = attempt.changed.values() if isinstance(attempt.changed, dict) else [None]
    pairs = all(isinstance(values, list) and len(values) == 2 for values in changed)
    return attempt if type(attempt.number) is int and pairs else None


def append_attempt(directory: Path, attempt: Attempt) -> None:
    """Write its line, in one piece."""
    file = os.open(directory / ATTEMPTS, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
    try:
        size = os.fstat(file).st_size
        torn = size > 0 and os.pread(file, 1, size - 1) != b"\n"
        os.write(file, ("\n" * torn + dumps(asdict(attempt)) + "\n").encode())
        os.fsync(file)
    finally:
        os.close(file)


def began_with(directory: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """The values that the run had when it began, of those keys that have had others since.

    config: by dotted key, of the attempt that trained last.
    """
    first: dict[str, Any] = {}
    for attempt in read_attempts(directory):
        for key, (before, _) in attempt.changed.items():
            first.setdefault(key, before)
    return {**config, **first}


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def last_line(text: str) -> str | None:
    """Of what is told of a failure."""
    return text.strip().splitlines()[-1] if text.strip() else None


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # of no name, as in some containers
        return str(os.getuid())
