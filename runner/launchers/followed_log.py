"""A log file that another process writes, possibly on another machine, printed here as it grows."""

from pathlib import Path


class FollowedLog:
    """Prints what is appended to a file, which need not exist yet. What it has now is not printed if `only_new`."""

    def __init__(self, path: Path, only_new: bool = False):
        self._path = path
        self._offset = path.stat().st_size if only_new and path.exists() else 0

    def print_new(self) -> None:
        if self._path.exists():
            with self._path.open(errors="replace") as file:
                file.seek(self._offset)
                print(file.read(), end="", flush=True)
                self._offset = file.tell()
