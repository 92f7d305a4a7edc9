"""The process that mirrors a directory to an object store: `python -m runner.checkpoints.mirror`.

`MirrorProcess` starts it. At the end of its input, which is the end of the run or the death of its process, it uploads
what is left, and exits.
"""

import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from runner.checkpoints.part_mirror import PartMirror
from runner.checkpoints.run_mirror import RunMirror
from runner.errors import InputError
from runner.records.ledger import LEDGER
from runner.records.settings import OVERRIDES
from runner.remote.address import Address
from runner.remote.object_lock import RENEW_S, ObjectLock
from runner.remote.store import ObjectStore, Stale, StoreError

T = TypeVar("T")
Mirror = RunMirror | PartMirror

POLL_S = 0.5


def _reply(**message: Any) -> None:
    with suppress(OSError):  # the run was killed
        print(json.dumps(message), flush=True)


def _run(mirror: Mirror, ended: threading.Event, patience_s: float) -> None:
    """Mirror until the run has ended and all is uploaded, or the store has failed for longer than the patience."""
    parent, failing_since, error = os.getppid(), None, ""
    is_reported, waited, lost, num_completed = False, 0.0, threading.Event(), 0

    def renew_regularly() -> None:
        while not lost.wait(RENEW_S):
            try:
                mirror.renew(is_ending=ended.is_set())
            except Stale:
                lost.set()
            except StoreError:
                continue

    threading.Thread(target=renew_regularly, daemon=True).start()
    num_retries = 0
    while not lost.is_set():
        if mirror.store.num_retries > num_retries:
            num_retries = mirror.store.num_retries
            _reply(retries=num_retries)
        is_last = ended.wait(waited) or os.getppid() != parent
        if is_last:
            ended.set()
        try:
            mirror.sync(is_last)
            if is_last and not mirror.left():
                break
            if is_last:
                raise StoreError("files of the run change while they are uploaded", False)
            failing_since, waited = None, POLL_S
        except Stale:
            lost.set()
        except StoreError as failure:
            error = str(failure)
            if failing_since is None or mirror.num_completed > num_completed:
                failing_since, num_completed = time.monotonic(), mirror.num_completed
            if is_late := time.monotonic() - failing_since > patience_s:
                if is_last:
                    break
                if not is_reported:
                    _reply(failed=f"{error}; uploads have failed for {patience_s:g} s (remote.patience_s)")
            is_reported |= is_late
            time.sleep(min(1.0, patience_s / 10))
    if lost.is_set():
        _reply(failed="another run has taken over the lock of the remote directory")
        ended.wait()
    else:
        lost.set()
    _reply(left=mirror.left(), error=error, retries=mirror.store.num_retries)


def _patiently(function: Callable[[], T], patience_s: float) -> T:
    """Call the function again while the store fails temporarily, up to the patience. Raise StoreError."""
    deadline = time.monotonic() + patience_s
    while True:
        try:
            return function()
        except StoreError as error:
            if error.is_permanent or time.monotonic() > deadline:
                raise
            time.sleep(min(1.0, patience_s / 10))


def _open(order: dict[str, Any]) -> Mirror:
    """Return the mirror of the directory that the input orders. Raise InputError or StoreError."""
    store, directory = ObjectStore(Address.parse(order["address"]), order["options"]), Path(order["directory"])
    patience_s = order["patience_s"]
    if order["is_part"]:
        return _patiently(lambda: PartMirror(store, directory), patience_s)
    lock = ObjectLock(store, str(directory), os.getppid(), patience_s)
    _patiently(lock.acquire, patience_s)
    for name in (OVERRIDES, LEDGER):
        if not (directory / name).exists() and _patiently(partial(store.find, name), patience_s) is not None:
            lock.release()
            raise InputError(
                f"{order['address']} contains another run or sweep; repeat the command, or resume that one"
            )
    return _patiently(lambda: RunMirror(store, directory, lock), patience_s)


def main() -> None:
    """Read the store's address and options, then the directory, from the input, and mirror it."""
    try:
        order = json.loads(sys.stdin.readline())
        patience_s = order["patience_s"]
        _patiently(ObjectStore(Address.parse(order["outputs"]), order["options"]).check_writable, patience_s)
        _reply()
        if not (line := sys.stdin.readline().strip()):
            return
        order |= json.loads(line)
        mirror = _open(order)
        _reply()
    except (InputError, StoreError) as error:
        _reply(refused=str(error).splitlines())
        return
    ended = threading.Event()

    def wait_for_end() -> None:
        with suppress(OSError):
            sys.stdin.readline()
        ended.set()

    threading.Thread(target=wait_for_end, daemon=True).start()
    try:
        _run(mirror, ended, patience_s)
    except Exception:
        _reply(failed=traceback.format_exc())
        raise
    finally:
        with suppress(StoreError, Stale):
            mirror.close()


if __name__ == "__main__":
    main()
