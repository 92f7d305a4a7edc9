"""Links to checkpoints, and the removal of old checkpoints and of directories that a crash has left."""

import os
import shutil
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path

from runner.checkpoints.layout import BEST, list_checkpoints, step_of

PARTIAL, DELETING = ".tmp", ".deleting"  # suffixes of directories that are not complete checkpoints


def set_link(directory: Path, name: str, path: Path | None) -> None:
    """Set the link directory/name to a checkpoint, or remove the link if `path` is None.

    Only people need the link. So an error is ignored, as of a file system without links, and a copy of a checkpoint in
    place of the link, as tools that follow links create it, is removed.
    """
    link, new = directory / name, directory / f"{name}.tmp"
    with suppress(OSError):
        if path is None or not link.is_symlink():
            _delete(link)
        if path is not None and not (link.is_symlink() and os.readlink(link) == path.name):
            _delete(new)
            new.symlink_to(path.name)  # relative, so that a run directory can be moved
            new.replace(link)
        flush(directory)


def retain(
    directory: Path,
    keep: int,
    best: Sequence[int],
    newest: int,
    damaged: Collection[int] = (),
) -> None:
    """Remove all checkpoints except the newest ones and those of the steps `best`, the best one first.

    Set the link `best`. The checkpoints after the step `newest` are damaged, and the run will replace them. `keep` does
    not count those of the steps `damaged`, which are removed if they are older.
    """
    paths = [path for path in list_checkpoints(directory) if step_of(path) <= newest]
    kept = {path for path in paths if step_of(path) in best}
    kept.update([path for path in paths if step_of(path) not in damaged][-keep:])
    set_link(directory, BEST, directory / f"step_{best[0]}" if best else None)
    for old in sorted(set(paths) - kept):
        remove(old)


def remove(path: Path) -> None:
    """Delete a checkpoint, which is either complete or absent at any moment."""
    renamed = path.with_name(path.name + DELETING)
    _delete(renamed)
    path.rename(renamed)
    flush(path.parent)
    _delete(renamed, ignore_errors=False)


def remove_leftovers(directory: Path, keep: Path | None = None) -> None:
    """Remove the directories that crashed saves have left, except `keep`. Call it on one rank, while no save runs."""
    for suffix in (PARTIAL, DELETING):
        for leftover in {*directory.glob(f"step_*{suffix}")} - {keep}:
            _delete(leftover)


def _delete(path: Path, ignore_errors: bool = True) -> None:
    """Delete a directory, or a file or link in its place, but never the files to which a link refers."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    else:
        shutil.rmtree(path, ignore_errors)


def flush(directory: Path) -> None:
    """Flush a directory's entries to the disk."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
