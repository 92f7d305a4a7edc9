"""The remote copy of a run directory, with its checkpoints.

A checkpoint exists completely or not at all: its files are uploaded first, then the records of the run, so that they
reach at least as far as the checkpoint, and last its manifest.
"""

import json
import os
import shutil
import threading
from contextlib import suppress
from pathlib import Path

from runner.checkpoints.changed_files import ChangedFiles
from runner.checkpoints.layout import MANIFEST, STEP, FileRecord, best_steps, list_checkpoints, read_manifest, step_of
from runner.checkpoints.part_mirror import WANTED
from runner.records.run_directory import CHECKPOINTS
from runner.remote.object_lock import ObjectLock
from runner.remote.store import ObjectStore, Stale, StoreError

PINNED = ".uploading"  # hard links to the files of the checkpoint that is uploaded, which the run may remove meanwhile


class RunMirror:
    """The mirror of a run directory, or of another directory without checkpoints; on rank 0's machine."""

    def __init__(self, store: ObjectStore, directory: Path, lock: ObjectLock):
        self.store, self._directory, self._lock, self._guard = store, directory, lock, threading.Lock()
        shutil.rmtree(directory / PINNED, ignore_errors=True)  # of a mirror that was killed
        self.files = ChangedFiles(store, directory)
        self.num_completed = 0  # checkpoints
        self._sent: dict[str, set[str]] = {}  # by checkpoint, the files of an upload that is not complete
        self._wanted: dict[str, dict[str, FileRecord]] = {}  # by checkpoint, the files that other machines upload
        self._published = b"{}"  # the content of the object `WANTED`
        self._first = {*self._local()}  # checkpoints that are local at the start
        self._seen = {*self._first}  # those that were local at any time
        self._remote: dict[str, bytes] = {}  # manifests by checkpoint; empty while it is deleted
        self._ignored: dict[str, bytes] = {}  # manifests of local checkpoints that lack files or are damaged
        store.delete([WANTED])
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
        """Upload what is missing, and delete the checkpoints that the run has removed.

        Raise Stale, or StoreError, which also names the files of a checkpoint that another machine has not uploaded.
        """
        self.files.upload(is_last)
        local = self._local()
        self._unpin({name for name in self._sent if name not in local})
        for name in local:
            self._seen.add(name)
            with suppress(FileNotFoundError):  # the run has removed it
                manifest = (self._directory / CHECKPOINTS / name / MANIFEST).read_bytes()
                if manifest not in (self._remote.get(name), self._ignored.get(name)):
                    self._upload_checkpoint(name)
        self._publish_wanted()
        self._retain()
        if self._wanted:
            name, files = next(iter(self._wanted.items()))
            raise StoreError(f"{CHECKPOINTS}/{name} waits for {', '.join(files)} of another machine", False)

    def left(self) -> list[str]:
        """Return the names of the checkpoints and records that are not uploaded."""
        names = [name for name in self._local() if not (self._remote.get(name) or name in self._ignored)]
        return [*(f"{CHECKPOINTS}/{name}" for name in names), *self.files.names()]

    def close(self) -> None:
        """Release the lock, unless it is lost. Raise Stale or StoreError."""
        shutil.rmtree(self._directory / PINNED, ignore_errors=True)
        self.renew(is_ending=True)  # a lost lock must not be released
        self._wanted = {}
        self._publish_wanted()
        self._lock.release()

    def _local(self) -> list[str]:
        """Return the names of the complete local checkpoints, the newest first."""
        return [path.name for path in list_checkpoints(self._directory / CHECKPOINTS)[::-1]]

    def _upload_checkpoint(self, name: str) -> None:
        """Upload a checkpoint, or its local files if other machines have the rest."""
        files, prefix = self._pin(name), f"{CHECKPOINTS}/{name}"
        manifest = files[MANIFEST].read_bytes()
        listed: dict[str, FileRecord] = {}
        with suppress(ValueError):  # the manifest is damaged
            listed = read_manifest(files[MANIFEST].parent)
        others = {file: record for file, record in listed.items() if file not in files}
        if not listed or (others and name in self._first):  # an earlier attempt has not completed it on all machines
            self._ignored[name] = manifest
            return
        if name in self._remote:  # the run was resumed from an older checkpoint, and has come here again
            self._delete(name)
        sent = self._sent.setdefault(name, set())
        if not sent:  # files that a crash has left
            self.store.delete([each.path for each in self.store.list(prefix)])
        for file in sorted(files.keys() - {MANIFEST} - sent):
            self.store.put(f"{prefix}/{file}", files[file])
            sent.add(file)
        if others and (missing := self._missing(prefix, others)):
            self._wanted[name] = missing
            return
        self.files.upload(is_forced=True)
        self.renew()  # a process that has lost the lock must not complete a checkpoint
        if not self.store.create(f"{prefix}/{MANIFEST}", manifest):
            raise Stale(f"{prefix}/{MANIFEST}")
        self._remote[name] = manifest
        self.num_completed += 1
        self._unpin({name})

    def _missing(self, prefix: str, files: dict[str, FileRecord]) -> dict[str, FileRecord]:
        """Return those of the files that do not exist remotely."""
        sizes = {each.path: each.size for each in self.store.list(prefix)}
        return {file: record for file, record in files.items() if sizes.get(f"{prefix}/{file}") != record["size"]}

    def _publish_wanted(self) -> None:
        """Publish which files the mirrors of other machines have to upload."""
        content = json.dumps(self._wanted).encode()
        if content != self._published:
            if self._wanted:
                self.store.put(WANTED, content)
            else:
                self.store.delete([WANTED])
            self._published = content

    def _pin(self, name: str) -> dict[str, Path]:
        """Return the files of a checkpoint by name, as hard links if the file system permits.

        Raise FileNotFoundError if the run removes it meanwhile. Files of other machines may appear later.
        """
        source, pinned = self._directory / CHECKPOINTS / name, self._directory / PINNED / name
        pinned.mkdir(parents=True, exist_ok=True)
        files = {path.name: path for path in source.iterdir()}
        try:
            for file in files.keys() - {path.name for path in pinned.iterdir()}:
                os.link(files[file], pinned / file)
        except FileNotFoundError:
            raise
        except OSError:
            shutil.rmtree(pinned)
            return files
        return {path.name: path for path in pinned.iterdir()}

    def _unpin(self, names: set[str]) -> None:
        for name in names:
            shutil.rmtree(self._directory / PINNED / name, ignore_errors=True)
            self._sent.pop(name, None)
            self._wanted.pop(name, None)

    def _retain(self) -> None:
        """Delete the checkpoints that the run has removed, the oldest first, but never more than are replaced.

        Once the run has removed one, it has as many as it keeps. So older ones are deleted too, which are not local
        because an earlier attempt ended before it deleted them, or because another machine made them.
        """
        local = self._local()
        gone = self._seen - {*local}
        newest_gone = max(map(_step_of, gone), default=0)
        removed = gone & self._remote.keys()
        if older := {name for name in self._remote.keys() - {*local} if _step_of(name) < newest_gone}:
            removed |= older - {f"step_{step}" for step in best_steps(self._directory)}
        if set(local) - self._first:  # later ones belong to an attempt whose uploads ended after this one began
            newest = step_of(Path(local[0]))
            removed |= {name for name in self._remote.keys() - {*local} if _step_of(name) > newest}
        for name in sorted(removed, key=_step_of):
            if len(self._remote) > max(1, len(local)):
                self._delete(name)

    def _delete(self, name: str) -> None:
        """Delete a checkpoint, its manifest first."""
        prefix = f"{CHECKPOINTS}/{name}"
        self._remote[name] = b""  # an error may interrupt the deletion, which is then repeated
        self.store.delete([f"{prefix}/{MANIFEST}"])
        self.store.delete([each.path for each in self.store.list(prefix)])
        del self._remote[name]


def _step_of(name: str) -> int:
    return step_of(Path(name)) if STEP.fullmatch(name) else -1
