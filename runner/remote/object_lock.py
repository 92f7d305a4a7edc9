"""The lock of a run in an object store: one object, created conditionally and renewed by compare-and-swap."""

import json
import os
import signal
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from runner.errors import InputError
from runner.process.identity import machine_id, process_start
from runner.remote.store import ObjectStore, Stale

LOCK = "lock.json"
RENEW_S = 10.0
DEAD_AFTER_S = 60.0
_POLL_S = 0.5


class ObjectLock:
    """The lock that this process, which mirrors a run, owns from `acquire` to `release`.

    The object names the owner's process and the process of the run. An owner on this machine is dead if neither exists,
    and an owner on another machine if the object does not change for a minute.
    """

    def __init__(self, store: ObjectStore, directory: str, run_pid: int, patience_s: float):
        self._store, self._patience_s = store, patience_s
        self._facts: dict[str, Any] = {
            **{"id": uuid.uuid4().hex, "machine": _machine(), "host": os.uname().nodename, "directory": directory},
            **{"pid": os.getpid(), "start": process_start(os.getpid())},
            **{"run_pid": run_pid, "run_start": process_start(run_pid)},
            **{"renewals": 0, "is_ending": False},
        }
        self._e_tag = ""

    def acquire(self) -> None:
        """Lock the run. Raise InputError, which names the owner, if another run has locked it.

        Wait for an owner whose run was killed and that still uploads its files, up to the patience.
        """
        seen: tuple[str, float] | None = None
        deadline = time.monotonic() + self._patience_s
        while not self._store.create(LOCK, self._content()):
            e_tag, facts = self._store.find(LOCK), _read(self._store.get(LOCK))
            if e_tag is None:
                continue
            if seen is None or seen[0] != e_tag:
                is_renewed = seen is not None
                seen = e_tag, time.monotonic()
                if is_renewed and not facts.get("is_ending"):
                    raise self._owned(facts)
            if self._may_take(facts, time.monotonic() - seen[1]):
                with suppress(Stale):
                    self._e_tag = self._store.replace(LOCK, self._content(), e_tag)
                    return
            if time.monotonic() > deadline:
                raise self._owned(facts)
            time.sleep(_POLL_S)
        self._e_tag = self._store.find(LOCK) or ""

    def _may_take(self, facts: Mapping[str, Any], unchanged_s: float) -> bool:
        """Return True if the owner is dead. Stop an owner that uploads the files of the same local directory."""
        if facts.get("machine") != self._facts["machine"]:
            return unchanged_s > DEAD_AFTER_S
        if _is_alive(facts, "run_pid", "run_start"):
            raise self._owned(facts)
        if not _is_alive(facts, "pid", "start"):
            return True
        if facts.get("directory") == self._facts["directory"]:  # this process uploads them
            with suppress(OSError):
                os.kill(facts["pid"], signal.SIGTERM)
        return False

    def renew(self, is_ending: bool = False) -> None:
        """Renew the lock. Raise Stale if another run has taken it. is_ending: the run has ended, or was killed."""
        self._facts["renewals"] += 1
        self._facts["is_ending"] = is_ending
        self._e_tag = self._store.replace(LOCK, self._content(), self._e_tag)

    def release(self) -> None:
        self._store.delete([LOCK])

    def _content(self) -> bytes:
        return json.dumps(self._facts).encode()

    def _owned(self, facts: Mapping[str, Any]) -> InputError:
        owner = f"process {facts.get('run_pid')} on {facts.get('host')}"
        return InputError(f"{self._store.address} has been locked by {owner}; wait for it, or end it first")


def owner_of(store: ObjectStore) -> str | None:
    """Return an identifier of the process that has locked the run, or None if the run is not locked."""
    found = _read(store.get(LOCK)).get("id")
    return None if found is None else str(found)


def _machine() -> str:
    try:
        return machine_id()
    except OSError:  # not Linux: only the renewals count
        return uuid.uuid4().hex


def _is_alive(facts: Mapping[str, Any], pid: str, start: str) -> bool:
    return type(facts.get(pid)) is int and process_start(facts[pid]) == facts.get(start) is not None


def _read(content: bytes | None) -> dict[str, Any]:
    with suppress(ValueError):
        if isinstance(facts := json.loads(content or b"{}"), dict):
            return facts
    return {}
