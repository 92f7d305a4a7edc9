"""The attempts of a run, in `attempts.jsonl`: who started each, which values were changed, and how it ended."""

import getpass
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from runner.records.run_files import append_json_lines, parse_json, read_lines

ATTEMPTS = "attempts.jsonl"
KILLED = "killed"  # the state of an attempt that could not record its end
REGROUPED = "regrouped"  # the state of an attempt whose ranks continued in another world


def user_name() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # the user has no name, as in some containers
        return str(os.getuid())


def utc_now() -> str:
    """Return the time as 2026-11-22T06:18:30.125+00:00."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


@dataclass
class Attempt:
    """One start of the run. The defaults describe this process and the current time.

    An attempt is written as a line when it ends. The line of a killed attempt is written by the next attempt.
    """

    number: int
    user: str = field(default_factory=user_name)
    pid: int = field(default_factory=os.getpid)  # of rank 0, which writes
    started: str = field(default_factory=utc_now)
    ended: str | None = None  # for a killed attempt, when it last touched its lock file or logged
    state: str = "running"  # preempted, failed or one of DONE, as in result.json, or killed
    hosts: list[str] = field(default_factory=lambda: [socket.gethostname()])  # in the order of their ranks
    world_size: int = 1
    parallel: str = ""
    first_step: int | None = None  # the step after which the attempt continued; None if it did not start training
    step: int | None = None  # the last step
    changed: dict[str, list[Any]] = field(default_factory=dict)  # by key: the run's initial and this attempt's value
    code: str | None = None  # the hash of the custom modules: see runner.records.custom_code
    error: str | None = None  # the last line of the error
    reason: str | None = None  # which ranks were lost or joined, if the attempt continues from a copy in memory
    continues: bool = False  # the same command started it after the attempt before: the time between both counts


def read_attempts(directory: Path) -> Iterator[Attempt]:
    """Yield the attempts that have ended, in order, without damaged lines. Raise InputError for an unreadable file."""
    with suppress(FileNotFoundError):
        for line in read_lines(directory / ATTEMPTS):
            with suppress(ValueError, RecursionError):
                facts = parse_json(line)
                if isinstance(facts, dict) and (attempt := parse_attempt(facts)) is not None:
                    yield attempt


def parse_attempt(facts: Mapping[str, Any]) -> Attempt | None:
    """Return the attempt with these fields, or None if they are not valid. Unknown fields are ignored."""
    try:
        attempt = Attempt(**{each.name: facts[each.name] for each in fields(Attempt) if each.name in facts})
    except TypeError:  # a field is missing
        return None
    changed = attempt.changed.values() if isinstance(attempt.changed, dict) else [None]
    are_pairs = all(isinstance(values, list) and len(values) == 2 for values in changed)
    return attempt if type(attempt.number) is int and are_pairs else None


def append_attempt(directory: Path, attempt: Attempt) -> None:
    append_json_lines(directory / ATTEMPTS, asdict(attempt))


def seconds_of(directory: Path, current: Attempt | None = None) -> float:
    """Return the seconds of all attempts that have ended, and those before each attempt that continues another one.

    The time until a new command resumes the run does not count. current: an attempt that has not ended, of which only
    the seconds before it count.
    """
    total, before = 0.0, None
    for attempt in (*read_attempts(directory), *([current] if current is not None else [])):
        with suppress(TypeError, ValueError):  # a damaged time
            started = datetime.fromisoformat(attempt.started)
            ended = datetime.fromisoformat(attempt.ended or attempt.started)
            since = before if attempt.continues and before is not None else started
            total += max((ended - since).total_seconds(), 0.0)
            before = ended
    return total


def initial_values(directory: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return `config`, of the last attempt that trained, with the initial values of the keys that attempts changed."""
    first: dict[str, Any] = {}
    for attempt in read_attempts(directory):
        for key, (before, _) in attempt.changed.items():
            first.setdefault(key, before)
    return {**config, **first}


def error_line(text: str) -> str | None:
    """Return the line that names the error, after "rank N on HOST:" and a traceback; None if the text is empty."""
    lines = text.strip().splitlines()
    if not lines:
        return None
    frames = [number for number, line in enumerate(lines) if line.startswith("  ")]
    number = frames[-1] + 1 if frames else int(lines[0].endswith(":"))
    return lines[min(number, len(lines) - 1)]
