"""The lock of a run directory: the file `holder-N.json`, which its owner creates atomically and touches regularly.

The owner is dead if its process does not exist, on the same machine, or if it has not touched its file for a minute, on
another machine. To take over the lock, a process creates the file with the next number; only one of several can.
"""

import json
import os
import re
import threading
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from runner.errors import InputError, print_messages
from runner.records.attempts import KILLED, Attempt, append_attempt, parse_attempt, read_attempts

HEARTBEAT_S = 5.0
DEAD_AFTER_S = 60.0
POLL_S = 0.2
_NAME = re.compile(r"holder-(\d+)\.json")
_FIELDS = {field.name for field in fields(Attempt)}


class RunLock:
    """A lock that this process owns until it calls `release` or exits. A thread touches the file."""

    def __init__(self, path: Path, facts: Mapping[str, Any]):
        self.path, self._facts, self._text = path, facts, _to_text(facts)
        self._touched, self._lost, self._released = time.monotonic(), False, threading.Event()
        self._thread = threading.Thread(target=self._touch_regularly, daemon=True, name="run lock")
        self._thread.start()

    def is_lost(self) -> bool:
        """Return True if another process has taken over because this one seemed dead, as a suspended process does."""
        if time.monotonic() - self._touched > 2 * HEARTBEAT_S:
            self._touch()
        return self._lost

    def release(self) -> None:
        self._released.set()
        self._thread.join()
        with suppress(OSError):
            if not self._lost and self.path.read_text(errors="replace") == self._text:
                self.path.unlink()

    def _touch_regularly(self) -> None:
        while not self._released.wait(HEARTBEAT_S):
            self._touch()

    def _touch(self) -> None:
        try:
            self._lost = self.path.read_text(errors="replace") != self._text
            if not self._lost:
                os.utime(self.path)
        except FileNotFoundError:
            directory = self.path.parent
            was_taken_over = any(attempt.number == self._facts["number"] for attempt in read_attempts(directory))
            self._lost = was_taken_over or bool(_lock_files(directory)) or not _create(self.path, self._facts)
        except OSError:  # a network file system may be unavailable for a while
            return
        self._touched = time.monotonic()


def next_number(directory: Path) -> int:
    """Return the number of a new attempt: one more than those of recorded attempts and of lock files."""
    recorded = [attempt.number for attempt in read_attempts(directory)]
    locked = [facts.get("number") for facts in map(_read, _lock_files(directory).values())]
    return max([*recorded, *(number for number in locked if type(number) is int)], default=0) + 1


def lock_directory(directory: Path, attempt: Attempt, previous: int | None = None) -> RunLock:
    """Lock the directory, and record the attempt of an owner that has died.

    previous: the number of this world's previous attempt, if its agent has terminated and restarted the world. Its lock
    is taken over without a check. Raises InputError that names the owner if another process owns the lock.
    """
    facts = {**asdict(attempt), "machine": _machine(), "process_start": _process_start(os.getpid())}
    while True:
        before = _lock_files(directory)
        newest = max(before, default=0)
        found = _read(before[newest]) if before else {}
        is_previous = previous is not None and found.get("number") == previous
        if before and not is_previous and _is_alive(before[newest], found):
            raise InputError(_refusal(before[newest]))
        # Attempts have unique numbers, so the file name of a stalled owner is never used again.
        number = max(newest + 1, attempt.number)
        path = directory / f"holder-{number}.json"
        if not _create(path, facts):
            continue  # another process was faster; check whether it is alive
        if _lock_files(directory).keys() - {*before, number}:
            # Another process has locked the directory after a dead lock was taken over and released.
            path.unlink(missing_ok=True)
            continue
        for dead in before.values():
            _record_killed(directory, dead)
        return RunLock(path, facts)


def _refusal(path: Path) -> str:
    facts = _read(path)
    owner = f"process {facts.get('pid', '?')} on {facts.get('host', '?')} ({facts.get('user', '?')})"
    return f"{path.parent} has been locked by {owner} since {facts.get('started', '?')}; wait for it, or end it first"


def _record_killed(directory: Path, path: Path) -> None:
    """Append the attempt of a dead owner to attempts.jsonl, and remove its lock file."""
    facts, last_touched = _read(path), _mtime(path)
    attempt = parse_attempt({name: value for name, value in facts.items() if name in _FIELDS})
    if attempt is not None and all(other.number != attempt.number for other in read_attempts(directory)):
        attempt.state, attempt.ended = KILLED, datetime.fromtimestamp(last_touched, UTC).isoformat(timespec="seconds")
        append_attempt(directory, attempt)
    path.unlink(missing_ok=True)


def _is_alive(path: Path, facts: Mapping[str, Any]) -> bool:
    if facts.get("machine") == _machine() and isinstance(facts.get("pid"), int):
        return _process_start(facts["pid"]) == facts.get("process_start") is not None
    touched = _mtime(path)
    if not touched or _file_system_time(path.parent) - touched > DEAD_AFTER_S:
        return False
    print_messages(
        [f"waiting up to {DEAD_AFTER_S:g} s to see if process {facts.get('pid')} on {facts.get('host')} is running"]
    )
    deadline = time.monotonic() + DEAD_AFTER_S
    while time.monotonic() < deadline:
        time.sleep(POLL_S)
        if (now := _mtime(path)) != touched:
            return now > 0
    return False


def _lock_files(directory: Path) -> dict[int, Path]:
    found = {path: _NAME.fullmatch(path.name) for path in directory.glob("holder-*.json")}
    return {int(match[1]): path for path, match in found.items() if match}


def _create(path: Path, facts: Mapping[str, Any]) -> bool:
    """Create the file exclusively, also on NFS. Return False if it exists."""
    try:
        with path.open("x") as file:
            file.write(_to_text(facts))
    except FileExistsError:
        return False
    return True


def _to_text(facts: Mapping[str, Any]) -> str:
    return json.dumps(facts) + "\n"


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _mtime(path: Path) -> float:
    """Return the modification time by the file system's clock, or 0 if the file does not exist."""
    try:
        with path.open() as file:  # opening the file makes NFS fetch its current attributes
            return os.fstat(file.fileno()).st_mtime
    except OSError:
        return 0.0


def _file_system_time(directory: Path) -> float:
    """Return the current time by the file system's clock, which may differ from this machine's."""
    path = directory / f".holder-{uuid.uuid4().hex}"
    try:
        path.touch()
        return path.stat().st_mtime
    finally:
        path.unlink(missing_ok=True)


def _machine() -> str:
    """Return an identifier of this boot of the machine and of the PID namespace, within which PIDs are unique.

    On systems without Linux's /proc the identifier is unique, so that only the heartbeat shows if an owner is alive.
    """
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return uuid.uuid4().hex


def _process_start(pid: int) -> str | None:
    """Return the start time of the process, which identifies it if its PID is reused, or None if it has exited."""
    try:
        state, *others = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if state in "ZX" else others[18]  # field 22: clock ticks since boot
