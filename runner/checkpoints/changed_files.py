"""The files of a directory except its checkpoints, which are uploaded whenever they have changed."""

import os
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from runner.records.run_directory import CHECKPOINTS
from runner.records.settings import OVERRIDES
from runner.remote.store import ObjectStore

SAME_FILE_S = 10.0  # the shortest time between two uploads of a file that changes all the time
_NOT_UPLOADED = re.compile(r"(^|/)\.|(^|/)holder-\d+\.json$|\.(tmp|deleting|fork)(/|$)")
Facts = tuple[int, int]  # the time of modification and the size


class ChangedFiles:
    """The records in the directory of a run or a sweep, without those of its jobs.

    are_uploaded: only those that change from now on are uploaded.
    """

    def __init__(self, store: ObjectStore, directory: Path, are_uploaded: bool = False):
        self._store, self._directory = store, directory
        self._facts: dict[str, Facts] = {}  # of the uploaded files
        self._uploaded_at: dict[str, float] = {}
        if are_uploaded:
            self._facts = {name: facts for name, facts, _ in self._changed()}

    def upload(self, is_forced: bool = False) -> None:
        """Upload the changed files; overrides.yaml last, because it makes the directory a run for readers.

        is_forced: also files that were uploaded less than `SAME_FILE_S` ago.
        """
        now = time.monotonic()
        for name, facts, path in sorted(self._changed(), key=lambda each: each[0] == OVERRIDES):
            if is_forced or now - self._uploaded_at.get(name, -SAME_FILE_S) >= SAME_FILE_S:
                with suppress(FileNotFoundError):  # the run has removed it
                    self._store.put(name, path)
                    self._facts[name], self._uploaded_at[name] = facts, time.monotonic()

    def delete(self) -> None:
        """Delete the uploaded files from the store."""
        self._store.delete([*self._facts])

    def names(self) -> list[str]:
        """Return the names of the files that have changed since they were uploaded."""
        return [name for name, _, _ in self._changed()]

    def _changed(self) -> Iterator[tuple[str, Facts, Path]]:
        for folder, folders, files in os.walk(self._directory):
            if Path(folder) == self._directory:
                folders[:] = [each for each in folders if each != CHECKPOINTS]
            elif OVERRIDES in files:  # a job of a sweep, which has a mirror for itself
                folders.clear()
                continue
            for file in files:
                path = Path(folder, file)
                name = path.relative_to(self._directory).as_posix()
                if _NOT_UPLOADED.search(name) or path.is_symlink():
                    continue
                with suppress(FileNotFoundError):
                    status = path.stat()
                    facts = status.st_mtime_ns, status.st_size
                    if self._facts.get(name) != facts:
                        yield name, facts, path
