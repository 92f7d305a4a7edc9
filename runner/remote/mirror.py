"""The process that mirrors a run directory to an object store: `python -m runner.remote.mirror`.

It uploads each file that has changed, and each complete checkpoint: its files, then the records of the run, and last
its manifest. So a checkpoint exists completely or not at all, and the records reach at least as far as the checkpoint.
`MirrorProcess` starts it. At the end of its input, which is the end of the run or the death of its process, it uploads
what is left, and exits.
"""

import json
import os
import re
import shutil
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from runner.errors import InputError
from runner.remote.address import Address
from runner.remote.object_lock import RENEW_S, ObjectLock
from runner.remote.store import ObjectStore, Stale, StoreError

T = TypeVar("T")

CHECKPOINTS, MANIFEST, OVERRIDES = "checkpoints", "manifest.json", "overrides.yaml"  # as in layers above
PINNED = ".uploading"  # hard links to the files of the checkpoint that is uploaded, which the run may remove meanwhile
POLL_S = 0.5
SAME_FILE_S = 10.0  # the shortest time between two uploads of a record that changes all the time
_STEP = re.compile(r"step_(\d+)")
_NOT_RECORDS = re.compile(r"(^|/)\.|(^|/)holder-\d+\.json$|\.(tmp|deleting|fork)(/|$)")


class Mirror:
    """The remote copy of one directory."""

    def __init__(self, store: ObjectStore, directory: Path, lock: ObjectLock):
        self._store, self._directory, self._lock, self._guard = store, directory, lock, threading.Lock()
        self._records: dict[str, tuple[int, int]] = {}  # the time of modification and the size as uploaded
        self._uploaded_at: dict[str, float] = {}
        self._sent: dict[str, set[str]] = {}  # by checkpoint, the files of an upload that an error has interrupted
        self._seen, self._first = set[str](), set(self._local())  # checkpoints that were local; those at the start
        self._remote: dict[str, bytes] = {}  # manifests by checkpoint; empty while it is deleted
        found: dict[str, list[str]] = {}
        for each in store.list(CHECKPOINTS):
            found.setdefault(each.path.split("/")[1], []).append(each.path)
        for name, paths in found.items():
            if (manifest := store.get(f"{CHECKPOINTS}/{name}/{MANIFEST}")) is not None:
                self._remote[name] = manifest
            else:
                store.delete(paths)  # the upload was interrupted by a crash

    def renew(self, is_ending: bool = False) -> None:
        """Renew the lock, from any thread. Raise Stale if it is lost."""
        with self._guard:
            self._lock.renew(is_ending)

    def sync(self, is_last: bool = False) -> None:
        """Upload what is missing, and delete the checkpoints that the run has removed. Raise Stale or StoreError."""
        self._upload_records(is_last)
        self._unpin({name for name in self._sent if name not in self._local()})
        for name in self._local():
            self._seen.add(name)
            with suppress(FileNotFoundError):  # the run has removed it
                if self._remote.get(name) != (self._directory / CHECKPOINTS / name / MANIFEST).read_bytes():
                    self._upload_checkpoint(name)
        self._retain()

    def left(self) -> list[str]:
        """Return the names of the checkpoints and records that are not uploaded."""
        checkpoints = [f"{CHECKPOINTS}/{name}" for name in self._local() if not self._remote.get(name)]
        return [*checkpoints, *(name for name, _, _ in self._changed())]

    def _local(self) -> list[str]:
        """Return the names of the complete local checkpoints, the newest first."""
        names = {path.name for path in (self._directory / CHECKPOINTS).glob("step_*") if _STEP.fullmatch(path.name)}
        return sorted(names, key=_step_of, reverse=True)

    def _upload_checkpoint(self, name: str) -> None:
        files, prefix = self._pin(name), f"{CHECKPOINTS}/{name}"
        manifest = files[MANIFEST].read_bytes()
        if name in self._remote:  # the run was resumed from an older checkpoint, and has come here again
            self._delete(name)
        sent = self._sent.setdefault(name, set())
        if not sent:  # files that a crash has left
            self._store.delete([each.path for each in self._store.list(prefix)])
        for file in sorted(files.keys() - {MANIFEST} - sent):
            self._store.put(f"{prefix}/{file}", files[file])
            sent.add(file)
        self._upload_records(is_forced=True)
        self.renew()  # a process that has lost the lock must not complete a checkpoint
        if not self._store.create(f"{prefix}/{MANIFEST}", manifest):
            raise Stale(f"{prefix}/{MANIFEST}")
        self._remote[name] = manifest
        self._unpin({name})

    def _pin(self, name: str) -> dict[str, Path]:
        """Return the files of a checkpoint by name, as hard links if the file system permits."""
        source, pinned = self._directory / CHECKPOINTS / name, self._directory / PINNED / name
        if not pinned.exists():
            pinned.mkdir(parents=True)
            try:
                for path in source.iterdir():
                    os.link(path, pinned / path.name)
            except OSError:
                shutil.rmtree(pinned)
                return {path.name: path for path in source.iterdir()}
        return {path.name: path for path in pinned.iterdir()}

    def _unpin(self, names: set[str]) -> None:
        for name in names:
            shutil.rmtree(self._directory / PINNED / name, ignore_errors=True)
            self._sent.pop(name, None)

    def _retain(self) -> None:
        """Delete the checkpoints that the run has removed, the oldest first, but never more than are replaced."""
        local = self._local()
        removed = {name for name in self._remote if name in self._seen and name not in local}
        if set(local) - self._first:  # later ones belong to an attempt whose uploads ended after this one began
            removed |= {name for name in self._remote.keys() - {*local} if _step_of(name) > _step_of(local[0])}
        for name in sorted(removed, key=_step_of):
            if len(self._remote) > max(1, len(local)):
                self._delete(name)

    def _delete(self, name: str) -> None:
        """Delete a checkpoint, its manifest first."""
        prefix = f"{CHECKPOINTS}/{name}"
        self._remote[name] = b""  # an error may interrupt the deletion, which is then repeated
        self._store.delete([f"{prefix}/{MANIFEST}"])
        self._store.delete([each.path for each in self._store.list(prefix)])
        del self._remote[name]

    def _upload_records(self, is_forced: bool) -> None:
        """Upload the changed records; overrides.yaml last, because it makes the directory a run for readers."""
        now = time.monotonic()
        for name, facts, path in sorted(self._changed(), key=lambda each: each[0] == OVERRIDES):
            if is_forced or now - self._uploaded_at.get(name, -SAME_FILE_S) >= SAME_FILE_S:
                with suppress(FileNotFoundError):  # the run has removed it
                    self._store.put(name, path)
                    self._records[name], self._uploaded_at[name] = facts, time.monotonic()

    def _changed(self) -> Iterator[tuple[str, tuple[int, int], Path]]:
        """Yield the name, the time of modification with the size, and the path of each record to be uploaded."""
        for folder, folders, files in os.walk(self._directory):
            if Path(folder) == self._directory:
                folders[:] = [each for each in folders if each != CHECKPOINTS]
            for file in files:
                path = Path(folder, file)
                name = path.relative_to(self._directory).as_posix()
                if _NOT_RECORDS.search(name) or path.is_symlink():
                    continue
                with suppress(FileNotFoundError):
                    status = path.stat()
                    facts = status.st_mtime_ns, status.st_size
                    if self._records.get(name) != facts:
                        yield name, facts, path


def _step_of(name: str) -> int:
    found = _STEP.fullmatch(name)
    return int(found[1]) if found else -1


def _reply(**message: Any) -> None:
    with suppress(OSError):  # the run was killed
        print(json.dumps(message), flush=True)


def _run(mirror: Mirror, ended: threading.Event, patience_s: float) -> None:
    """Mirror until the run has ended and all is uploaded, or the store has failed for longer than the patience."""
    parent, failing_since, error = os.getppid(), None, ""
    is_reported, waited, lost = False, 0.0, threading.Event()

    def renew_regularly() -> None:
        while not lost.wait(RENEW_S):
            try:
                mirror.renew(is_ending=ended.is_set())
            except Stale:
                lost.set()
            except StoreError:
                continue

    threading.Thread(target=renew_regularly, daemon=True).start()
    while not lost.is_set():
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
            failing_since = failing_since or time.monotonic()
            if is_late := time.monotonic() - failing_since > patience_s:
                if is_last:
                    break
                if not is_reported:
                    _reply(failed=f"{error}; it has failed for {patience_s:g} s (remote.patience_s)")
            is_reported |= is_late
            time.sleep(min(1.0, patience_s / 10))
    if lost.is_set():
        _reply(failed="another run has taken over the lock of the remote directory")
        ended.wait()
    else:
        lost.set()
    _reply(left=mirror.left(), error=error)


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
        store, directory = ObjectStore(Address.parse(order["address"]), order["options"]), Path(order["directory"])
        lock = ObjectLock(store, str(directory), os.getppid(), order["patience_s"])
        _patiently(lock.acquire, patience_s)
        shutil.rmtree(directory / PINNED, ignore_errors=True)
        if not (directory / OVERRIDES).exists() and _patiently(lambda: store.find(OVERRIDES), patience_s) is not None:
            lock.release()
            raise InputError(f"{order['address']} contains another run; repeat the command, or resume that run")
        mirror = _patiently(lambda: Mirror(store, directory, lock), patience_s)
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
        shutil.rmtree(directory / PINNED, ignore_errors=True)
        with suppress(StoreError, Stale):
            mirror.renew(is_ending=True)  # a lost lock must not be released
            lock.release()


if __name__ == "__main__":
    main()
