"""The process that mirrors a directory to an object store: `python -m runner.checkpoints.mirror`.

`MirrorProcess` starts it. At the end of its input, which is the end of the run or the death of its process, it uploads
what is left, and exits. If the last line of the input is `DISCARD`, it deletes what it has uploaded instead.
"""

import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from runner.checkpoints.part_mirror import PartMirror
from runner.checkpoints.run_mirror import RunMirror
from runner.errors import InputError
from runner.records.ledger import LEDGER
from runner.records.settings import OVERRIDES
from runner.remote.address import Address
from runner.remote.mirror_process import DISCARD
from runner.remote.object_lock import RENEW_S, ObjectLock
from runner.remote.store import ObjectStore, Stale, StoreError

T = TypeVar("T")
Mirror = RunMirror | PartMirror

POLL_S = 0.5


def _reply(**message: Any) -> None:
    with suppress(OSError):  # the run was killed
        print(json.dumps(message), flush=True)


class _Upload:
    """The upload of a directory by its mirror, until the run has ended and all is uploaded."""

    def __init__(self, mirror: Mirror, patience_s: float):
        self._mirror, self._patience_s, self._parent = mirror, patience_s, os.getppid()
        self._ended, self._lost = threading.Event(), threading.Event()  # the run has ended; its lock is lost
        self._is_discarded = False

    def run(self) -> None:
        """Upload until the end, or after it until the store has failed for longer than the patience."""
        for wait in (self._wait_for_end, self._renew_regularly):
            threading.Thread(target=wait, daemon=True).start()
        error = self._sync_regularly()
        if self._lost.is_set():
            _reply(failed="another run has taken over the lock of the remote directory")
            self._ended.wait()
        left = [] if self._is_discarded else self._mirror.left()
        _reply(left=left, error=error, retries=self._mirror.store.num_retries)

    def _wait_for_end(self) -> None:
        with suppress(OSError):
            self._is_discarded = sys.stdin.readline().strip() == DISCARD
        self._ended.set()

    def _renew_regularly(self) -> None:
        while not self._lost.wait(RENEW_S):
            try:
                self._mirror.renew(is_ending=self._ended.is_set())
            except Stale:
                self._lost.set()
            except StoreError:
                continue

    def _sync_regularly(self) -> str:
        """Return the last error of the store."""
        failing_since, num_completed, num_retries, error = None, 0, 0, ""
        while not self._lost.is_set():
            if os.getppid() != self._parent:
                self._ended.set()
            is_last = self._ended.is_set()
            try:
                if self._sync(is_last):
                    break
                failing_since = None
            except Stale:
                self._lost.set()
            except StoreError as failure:
                error = str(failure)
                if failing_since is None or self._mirror.num_completed > num_completed:
                    failing_since, num_completed = time.monotonic(), self._mirror.num_completed
                if time.monotonic() - failing_since > self._patience_s:
                    if is_last:
                        break
                    _reply(failed=f"{error}; uploads have failed for {self._patience_s:g} s (remote.patience_s)")
                time.sleep(POLL_S)
            if self._mirror.store.num_retries > num_retries:
                num_retries = self._mirror.store.num_retries
                _reply(retries=num_retries)
            self._ended.wait(POLL_S)
        return error

    def _sync(self, is_last: bool) -> bool:
        """Upload what has changed. Return True if nothing remains to be done."""
        if is_last and self._is_discarded:
            self._mirror.files.delete()
            return True
        self._mirror.sync(is_last)
        if is_last and self._mirror.left():
            raise StoreError("files of the run change while they are uploaded", False)
        return is_last


def _patiently(function: Callable[[], T], patience_s: float) -> T:
    """Call the function again while the store fails temporarily, up to the patience. Raise StoreError."""
    deadline = time.monotonic() + patience_s
    while True:
        try:
            return function()
        except StoreError as error:
            if error.is_permanent or time.monotonic() > deadline:
                raise
            time.sleep(POLL_S)


def _open(order: dict[str, Any]) -> Mirror:
    """Return the mirror of the directory that the input orders. Raise InputError or StoreError."""
    store, directory = ObjectStore(Address.parse(order["address"]), order["options"]), Path(order["directory"])
    patience_s = order["patience_s"]
    if order["is_part"]:
        return _patiently(lambda: PartMirror(store, directory), patience_s)
    lock = ObjectLock(store, str(directory), os.getppid(), patience_s)

    def open_locked() -> RunMirror:
        lock.acquire()
        for name in (OVERRIDES, LEDGER):
            if not (directory / name).exists() and store.find(name) is not None:
                lock.release()
                raise InputError(
                    f"{order['address']} contains another run or sweep; repeat the command, or resume that one"
                )
        return RunMirror(store, directory, lock)

    return _patiently(open_locked, patience_s)


def main() -> None:
    """Read the store's address and options, then the directory, from the input, and mirror it."""
    try:
        order = json.loads(sys.stdin.readline())
        store = ObjectStore(Address.parse(order["outputs"]), order["options"])
        _patiently(store.check_writable, order["patience_s"])
        _reply()
        if not (line := sys.stdin.readline().strip()):
            return
        order |= json.loads(line)
        mirror = _open(order)
        _reply()
    except (InputError, StoreError) as error:
        _reply(refused=str(error).splitlines())
        return
    try:
        _Upload(mirror, order["patience_s"]).run()
    except Exception:
        _reply(failed=traceback.format_exc())
        raise
    finally:
        with suppress(StoreError, Stale):
            mirror.close()


if __name__ == "__main__":
    main()
