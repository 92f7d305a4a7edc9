"""What rank 0 sees of what the other ranks have written of a checkpoint."""

import os
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from runner.errors import JobFailed

SEEN_WITHIN_S = 10.0  # a network file system may be asked again for a name that was not there
_PAUSE_S = 0.1


def check_seen(partial: Path, files: Mapping[str, dict[str, Any]]) -> None:
    """Raises JobFailed where rank 0 does not see what another rank has written, and removes what none has.

    That is of a rank of a world before, which was thought dead: whoever reads all files of the folder would believe it.
    """
    until = time.monotonic() + SEEN_WITHIN_S
    for name, written in files.items():
        while _size_of(partial / name) != written["size"]:
            if time.monotonic() > until:
                raise JobFailed(
                    f"outputs={partial.parents[2]}: rank 0 does not see {name}, which another rank has written in "
                    f"{partial}; name a folder that all machines share"
                )
            time.sleep(_PAUSE_S)
    for entry in partial.glob("*"):
        if entry.name not in files:
            with suppress(OSError):
                entry.unlink()


def sizes(folder: Path) -> dict[str, int]:
    """Of the files that are in a folder, by name: bytes. Other processes may rename it meanwhile, or what is in it."""
    found = {}
    with suppress(OSError):
        for name in os.listdir(folder):
            with suppress(OSError):
                found[name] = (folder / name).stat().st_size
    return found


def _size_of(path: Path) -> int | None:
    """Of the file as its server has it: what a client remembers of a folder or a file, opening it renews."""
    try:
        with path.open("rb") as file:
            return os.fstat(file.fileno()).st_size
    except OSError:
        return None
