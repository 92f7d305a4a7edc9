"""A log file that another process writes, possibly on another machine, printed here as it grows."""

import sys
from contextlib import suppress
from pathlib import Path

from runner.records.output import FailSafeStream


class FollowedLog:
    """Prints what is appended to a file, which need not exist yet. only_new: skip its present content."""

    def __init__(self, path: Path, only_new: bool = False):
        self._path = path
        self._offset = path.stat().st_size if only_new and path.exists() else 0

    def print_new(self) -> None:
        """Print what was appended since the last call. An error of the file system, or a closed pipe, is ignored."""
        with suppress(OSError), self._path.open(errors="replace") as file:
            file.seek(self._offset)
            text = file.read()
            self._offset = file.tell()
            print(text, end="", file=FailSafeStream(sys.stdout), flush=True)
