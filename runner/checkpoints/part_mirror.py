"""The upload of what the ranks of a machine write, if the machine has a copy of the run directory for itself."""

import json
from contextlib import suppress
from pathlib import Path

from runner.checkpoints.changed_files import ChangedFiles
from runner.checkpoints.layout import is_saved, step_of
from runner.checkpoints.retention import PARTIAL
from runner.records.run_directory import CHECKPOINTS
from runner.remote.object_lock import owner_of
from runner.remote.store import ObjectStore, StoreError

WANTED = "wanted.json"  # the files of checkpoints that the mirror of rank 0's machine lacks: records by step and file


class PartMirror:
    """The mirror of a machine without rank 0.

    It uploads the records that change, such as logs/rank_R.txt, and the files of checkpoints that `WANTED` lists. The
    mirror of rank 0's machine writes `WANTED`, and completes a checkpoint when all of its files exist.
    """

    num_completed = 0  # the other mirror completes the checkpoints

    def __init__(self, store: ObjectStore, directory: Path):
        self.store, self._directory, self._owner = store, directory, owner_of(store)
        self.files = ChangedFiles(store, directory, are_uploaded=True)
        self._sent: dict[Path, str] = {}  # hashes of the uploaded parts

    def sync(self, is_last: bool = False) -> None:
        """Upload what is wanted. Raise StoreError if `is_last` and the other mirror has not ended."""
        self.files.upload(is_last)
        if is_last and owner_of(self.store) != self._owner:  # the other mirror has ended
            for part in self._parts():
                _remove(part)
            return
        if parts := self._parts():
            wanted = json.loads(self.store.get(WANTED) or b"{}")
            newest = max((step_of(Path(name)) for name in wanted), default=-1)
            for part in parts:
                name = part.parent.name.removesuffix(PARTIAL)
                if record := wanted.get(name, {}).get(part.name):
                    if self._sent.get(part) != record["sha256"] and is_saved(part, record):
                        self.store.put(f"{CHECKPOINTS}/{name}/{part.name}", part)
                        self._sent[part] = record["sha256"]
                elif name not in wanted and step_of(Path(name)) < newest:  # it is complete, or was removed
                    _remove(part)
                    self._sent.pop(part, None)
        if is_last:
            raise StoreError("the mirror of rank 0's machine has not completed the last checkpoint", False)

    def left(self) -> list[str]:
        """Return the names of the files that are not uploaded."""
        parts = [f"{CHECKPOINTS}/{part.parent.name}/{part.name}" for part in self._parts() if part not in self._sent]
        return [*parts, *self.files.names()]

    def renew(self, is_ending: bool = False) -> None:
        """Do nothing: the mirror of rank 0's machine owns the lock."""

    def close(self) -> None:
        """Do nothing."""

    def _parts(self) -> list[Path]:
        """Return the files of checkpoints that this machine's ranks have written; those of the latest may grow."""
        return sorted((self._directory / CHECKPOINTS).glob(f"step_*{PARTIAL}/*.safetensors"))


def _remove(part: Path) -> None:
    """Delete a file of a checkpoint, and the directory after its last file."""
    part.unlink()
    with suppress(OSError):
        part.parent.rmdir()
