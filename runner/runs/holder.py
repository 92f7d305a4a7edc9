"""Which world holds a run directory: `holder-N.json` in it, made in one piece, and touched for as long as that lives.

A holder has died where its process is gone, if that was on this machine, or where it has not touched its file for a
minute. Whoever takes over makes the file of the next number, which one of several alone can.
"""

import json
import os
import re
import socket
import threading
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from runner.errors import InputError, tell
from runner.runs.attempts import KILLED, Attempt, append_attempt, attempt_of, read_attempts

BEAT_S = 5.0
DEAD_AFTER_S = 60.0
POLL_S = 0.2
_NAME = re.compile(r"holder-(\d+)\.json")
_FACTS = {field.name for field in fields(Attempt)}


class Holder:
    """This process holds the directory until it lets go, or ends."""

    def __init__(self, path: Path, facts: Mapping[str, Any]):
        self.path, self._facts, self._text = path, facts, _text(facts)
        self._beaten, self._lost, self._ended = time.monotonic(), False, threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True, name="holder")
        self._thread.start()

    def is_lost(self) -> bool:
        """Whether another has taken over, because this process seemed dead, as one that was stopped does."""
        if time.monotonic() - self._beaten > 2 * BEAT_S:
            self._touch()
        return self._lost

    def release(self) -> None:
        """Let another world hold it."""
        self._ended.set()
        self._thread.join()
        if not self._lost and self._is_ours():
            self.path.unlink(missing_ok=True)

    def _beat(self) -> None:
        while not self._ended.wait(BEAT_S):
            self._touch()

    def _touch(self) -> None:
        try:
            self._lost = self.path.read_text(errors="replace") != self._text
            if not self._lost:
                os.utime(self.path)
        except FileNotFoundError:
            folder = self.path.parent
            over = any(attempt.number == self._facts["number"] for attempt in read_attempts(folder))
            self._lost = over or bool(_holders(folder)) or not _make(self.path, self._facts)
        except OSError:  # of a file system that is away for a while
            return
        self._beaten = time.monotonic()

    def _is_ours(self) -> bool:
        try:
            return self.path.read_text(errors="replace") == self._text
        except OSError:
            return False


def next_number(directory: Path) -> int:
    """Of the attempt that begins: those before have told how they ended, or have left their holder's file."""
    told = [attempt.number for attempt in read_attempts(directory)]
    left = [facts.get("number") for facts in map(_read, _holders(directory).values())]
    return max([*told, *(number for number in left if type(number) is int)], default=0) + 1


def hold(directory: Path, attempt: Attempt, again: int | None = None) -> Holder:
    """Make this process the holder, and write the line of an attempt that could not say how it ended.

    again: the number of the attempt with which this world has held it before its agent ended that and started it again.
    Raises InputError that names who holds it.
    """
    facts = {**asdict(attempt), "machine": _machine(), "process_start": _process_start(os.getpid())}
    while True:
        before = _holders(directory)
        newest = max(before, default=0)
        found = _read(before[newest]) if before else {}
        ours = again is not None and found.get("number") == again
        if before and not ours and _lives(before[newest], found):
            raise InputError(_refusal(directory, found))
        # Attempts' numbers never come again: a stalled holder's file is never made anew under its name.
        path = directory / f"holder-{max(newest + 1, attempt.number)}.json"
        if not _make(path, facts):
            continue  # another has been quicker: that one lives
        # One that has come in between, when a dead one had just been taken over and let go, was first.
        others = {
            number: other for number, other in _holders(directory).items() if other not in (path, before.get(newest))
        }
        if live := [told for other in others.values() if _lives(other, told := _read(other))]:
            path.unlink(missing_ok=True)
            raise InputError(_refusal(directory, live[0]))
        for dead in {**others, **before}.values():
            _bury(directory, dead)
        return Holder(path, facts)


def _refusal(directory: Path, facts: Mapping[str, Any]) -> str:
    who = f"process {facts.get('pid', '?')} on {facts.get('host', '?')} ({facts.get('user', '?')})"
    return f"{directory} is held by {who} since {facts.get('started', '?')}; wait for that, or end it first"


def _bury(directory: Path, path: Path) -> None:
    """Write what is known of how it ended, and remove the file of a holder that has died."""
    facts, seen = _read(path), _seen(path)
    attempt = attempt_of({name: value for name, value in facts.items() if name in _FACTS})  # None: none of our files
    if attempt is not None and all(other.number != attempt.number for other in read_attempts(directory)):
        attempt.state, attempt.ended = KILLED, datetime.fromtimestamp(seen, UTC).isoformat(timespec="seconds")
        append_attempt(directory, attempt)
    path.unlink(missing_ok=True)


def _lives(path: Path, facts: Mapping[str, Any]) -> bool:
    if facts.get("machine") == _machine() and isinstance(facts.get("pid"), int):
        return _process_start(facts["pid"]) == facts.get("process_start") is not None
    beat = _seen(path)
    if not beat or _now_in(path.parent) - beat > DEAD_AFTER_S:
        return False
    tell([f"waiting, {DEAD_AFTER_S:g} s at most: does process {facts.get('pid')} on {facts.get('host')} still run?"])
    deadline = time.monotonic() + DEAD_AFTER_S
    while time.monotonic() < deadline:
        time.sleep(POLL_S)
        if (seen := _seen(path)) != beat:
            return seen > 0
    return False


def _holders(directory: Path) -> dict[int, Path]:
    found = {path: _NAME.fullmatch(path.name) for path in directory.glob("holder-*.json")}
    return {int(match[1]): path for path, match in found.items() if match}


def _make(path: Path, facts: Mapping[str, Any]) -> bool:
    """Whether this process has made the file; no other can make the same one, also over a network."""
    partial = path.parent / f".holder-{uuid.uuid4().hex}"
    partial.write_text(_text(facts))
    try:
        os.link(partial, path)
        return True
    except FileExistsError:
        return False
    except OSError:  # a file system without links
        with suppress(FileExistsError), path.open("x") as file:
            file.write(_text(facts))
            return True
        return False
    finally:
        partial.unlink(missing_ok=True)


def _text(facts: Mapping[str, Any]) -> str:
    return json.dumps(facts) + "\n"


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _seen(path: Path) -> float:
    """When it was last touched, by the clock of the file system; 0 where it is gone."""
    try:
        with path.open() as file:  # opened, a file of another machine is looked at anew
            return os.fstat(file.fileno()).st_mtime
    except OSError:
        return 0.0


def _now_in(directory: Path) -> float:
    """By the clock of the file system, which need not be this machine's."""
    path = directory / f".holder-{uuid.uuid4().hex}"
    try:
        path.touch()
        return path.stat().st_mtime
    finally:
        path.unlink(missing_ok=True)


def _machine() -> str:
    """Where process ids mean the same: one machine, since it was started, and one namespace of processes."""
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()


def _process_start(pid: int) -> str | None:
    """What no other process of that id has; None where there is no such process, or one that has ended."""
    try:
        state, *others = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        if Path("/proc/self/stat").exists():
            return None
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return None
        except OSError:
            pass
        return "runs"
    return None if state in "ZX" else others[18]  # field 22: ticks since the machine was started
