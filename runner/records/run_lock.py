"""The lock of a run directory: the file `holder-N.json`, which its owner creates atomically and touches regularly.

An owner on the same machine is dead if its process does not exist, an owner on another machine if it has not touched
its file for a minute. To take over the lock, a process creates the file with the next number, which only one can do.
"""

import json
import os
import re
import tempfile
import threading
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from runner.errors import InputError, print_messages
from runner.process.identity import machine_id, process_start
from runner.records.attempts import KILLED, Attempt, append_attempt, parse_attempt, read_attempts
from runner.records.run_files import METRICS, read_mapping, without_links

HEARTBEAT_S = 5.0
CHECK_S = 1.0  # between checks before a file is written; a rank without which others continue was silent for longer
DEAD_AFTER_S = 60.0
POLL_S = 0.2
_NAME = re.compile(r"holder-(\d+)\.json")


class RunLock:
    """A lock that this process owns until it calls `release` or exits. A thread touches the file regularly.

    Raises FileExistsError if another process has created the file of this number; the creation is atomic, also on NFS.
    """

    def __init__(self, directory: Path, attempt: Attempt):
        self.path, self.attempt = directory / f"holder-{attempt.number}.json", attempt
        facts = {**asdict(attempt), "machine": _machine(), "process_start": process_start(os.getpid())}
        _create(self.path, json.dumps(facts) + "\n")
        self._touched, self._lost, self._released = time.monotonic(), False, threading.Event()
        self._thread = threading.Thread(target=self._touch_regularly, daemon=True, name="run lock")
        try:
            self._thread.start()
        except RuntimeError:  # a limit of threads: no other process may wait for this lock
            self.path.unlink()
            raise

    def is_lost(self) -> bool:
        """Return True if another process has taken over the lock, because this one was suspended and seemed dead."""
        if time.monotonic() - self._touched > CHECK_S:
            self._touch()
        return self._lost

    def release(self) -> None:
        self._released.set()
        self._thread.join()
        with suppress(OSError):
            self.path.unlink()

    def _touch_regularly(self) -> None:
        while not self._released.wait(HEARTBEAT_S):
            self._touch()

    def _touch(self) -> None:
        try:
            os.utime(self.path)
        except FileNotFoundError:
            self._lost = True
        except OSError:  # a network file system may be unavailable for a while
            return
        self._touched = time.monotonic()


@dataclass(frozen=True)
class LockOwner:
    """The process that has locked a directory."""

    is_alive: bool
    is_here: bool  # it runs, or ran, on this machine
    is_owner: bool  # it belongs to the owner of the lock file; only then may it be signaled
    pid: int | None
    host: str


def lock_directory(directory: Path, previous: int | None = None, **fields: Any) -> RunLock:
    """Lock the directory for a new attempt, and record the attempt of an owner that has died.

    previous: the number of this world's previous attempt, if its agent has restarted the world. The lock of that
    attempt is taken over without a check. fields: the fields of the new Attempt. Raises InputError, which names the
    owner, if another process owns the lock.
    """
    while True:
        before = _lock_files(directory)
        newest = max(before, default=0)
        if before and newest != previous and _is_alive(before[newest]):
            facts = _read(before[newest])
            owner = f"process {facts.get('pid')} on {_host(facts)} ({facts.get('user')})"
            since = f"since {facts.get('started')}; wait for it, or end it first"
            raise InputError(f"{directory} has been locked by {owner} {since}")
        # Attempt numbers are unique, so the file name of an owner that was taken for dead is never reused.
        number = max([newest, *(attempt.number for attempt in read_attempts(directory))]) + 1
        try:
            lock = RunLock(directory, Attempt(number, **fields))
        except FileExistsError:  # another process has just created it; check whether that process is alive
            continue
        if _lock_files(directory).keys() - {*before, number}:
            # Meanwhile one process has taken over and released the dead lock, and another has locked the directory.
            lock.release()
            continue
        for dead in before.values():
            _record_killed(directory, dead)
        return lock


def _record_killed(directory: Path, path: Path) -> None:
    """Append the attempt of a dead owner to attempts.jsonl, and remove its lock file."""
    attempt, last_touched = parse_attempt(_read(path)), max(_mtime(path), _mtime(directory / METRICS))
    if attempt is not None and all(other.number != attempt.number for other in read_attempts(directory)):
        attempt.state, attempt.ended = (
            KILLED,
            datetime.fromtimestamp(last_touched, UTC).isoformat(timespec="milliseconds"),
        )
        append_attempt(directory, attempt)
    path.unlink(missing_ok=True)


def find_owner(directory: Path) -> LockOwner | None:
    """Return the owner of the newest lock file, or None if there is no lock file. Nothing is written.

    The age of a lock file of another machine is measured by this machine's clock, so `is_alive` may be wrong if the
    clocks differ by almost a minute. `lock_directory` does not depend on clocks.
    """
    if not (files := _lock_files(directory)):
        return None
    path = files[max(files)]
    facts, touched = _read(path), _mtime(path)
    is_alive = _is_running_here(facts) if (is_here := _is_here(facts)) else time.time() - touched <= DEAD_AFTER_S
    pid, is_owner = facts.get("pid"), False
    with suppress(OSError):
        is_owner = path.stat().st_uid == Path(f"/proc/{pid}").stat().st_uid
    return LockOwner(is_alive, is_here, is_owner, pid if type(pid) is int else None, _host(facts))


def living_owner(directory: Path) -> LockOwner | None:
    """Return the owner of the newest lock file if it is alive, otherwise None."""
    owner = find_owner(directory)
    return owner if owner and owner.is_alive else None


def _host(facts: Mapping[str, Any]) -> str:
    """Return the machine of rank 0, which has locked the directory."""
    hosts = facts.get("hosts")
    return str(hosts[0]) if isinstance(hosts, list) and hosts else "an unknown host"


def _is_here(facts: Mapping[str, Any]) -> bool:
    return facts.get("machine") == _machine() and type(facts.get("pid")) is int


def _is_running_here(facts: Mapping[str, Any]) -> bool:
    return process_start(facts["pid"]) == facts.get("process_start") is not None


def _is_alive(path: Path) -> bool:
    facts, touched = _read(path), _mtime(path)
    if _is_here(facts):
        return _is_running_here(facts)
    with tempfile.TemporaryFile(dir=path.parent) as file:
        now = os.fstat(file.fileno()).st_mtime  # by the file system's clock, which may differ from this machine's
    if now - touched > DEAD_AFTER_S:
        return False
    owner = f"process {facts.get('pid')} on {_host(facts)}"
    print_messages([f"waiting up to {DEAD_AFTER_S:g} s to see if {owner} is running"])
    deadline = time.monotonic() + DEAD_AFTER_S
    while _mtime(path) == touched and time.monotonic() < deadline:
        time.sleep(POLL_S)
    return _mtime(path) not in (touched, 0.0)


def _create(path: Path, text: str) -> None:
    """Create the file with its whole content, or not at all. Raise FileExistsError if it exists."""
    try:
        with path.open("x") as file:
            file.write(text)
    except FileExistsError:
        raise
    except OSError as error:  # the disk is full: an empty file would look like the lock of an unknown process
        path.unlink(missing_ok=True)
        error.filename = str(path)
        raise


def _lock_files(directory: Path) -> dict[int, Path]:
    found = {path: _NAME.fullmatch(path.name) for path in directory.glob("holder-*.json")}
    return {int(match[1]): path for path, match in found.items() if match}


def _read(path: Path) -> dict[str, Any]:
    try:
        return read_mapping(path)
    except InputError:
        return {}


def _mtime(path: Path) -> float:
    """Return the modification time by the file system's clock, or 0 if the file does not exist."""
    # Opening the file makes NFS fetch its current attributes.
    with suppress(OSError), open(path, opener=without_links) as file:
        return os.fstat(file.fileno()).st_mtime
    return 0.0


def _machine() -> str:
    """Return the identifier of this machine, or without Linux's /proc a unique one: then only the heartbeat counts."""
    try:
        return machine_id()
    except OSError:
        return uuid.uuid4().hex
