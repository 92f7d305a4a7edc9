"""Datasets whose files torchvision reads, downloaded if they are missing."""

import http.client
import io
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

CONNECT_TIMEOUT_S = 10.0


def open_files(
    kind: Any, root: str, train: bool, download: bool, folder: str, names: Sequence[str], archives: Sequence[str]
) -> Any:
    """Return the torchvision dataset `kind` of the files `names` in root/folder, with its .data and .targets.

    If `download` is true, missing files are unpacked from `archives` (paths below root) or downloaded. Several
    processes may do so at once: each file is complete or absent at any time.
    Raise ValueError if files are missing and cannot be downloaded, or cannot be read.
    """
    directory = Path(root).expanduser()
    home = directory / folder
    missing = [name for name in names if not (home / name).is_file()]
    if missing:
        problem = f"root={root} has no {kind.__name__}: {', '.join(missing)} missing in {home}"
        other_root = f"set data.root to the directory that contains {folder}"
        if not download:
            raise ValueError(
                f"{problem}, and data.download is off; put them there, set data.download=true, or {other_root}"
            )
        try:
            _fetch(kind, directory, folder, names, archives)
        except (OSError, RuntimeError, http.client.HTTPException) as error:
            raise ValueError(
                f"{problem}, and downloading failed ({_line(error)}); put them there, or {other_root}"
            ) from error
    try:
        files = kind(directory, train=train)
    except Exception as error:  # parsers raise anything for a damaged file
        raise ValueError(
            f"root={root} has {kind.__name__} files that cannot be read ({_line(error)}); remove {home} and put them "
            "there again, or set data.root to another directory"
        ) from error
    if len(files.data) != len(files.targets):
        raise ValueError(
            f"root={root} has {len(files.data)} images but {len(files.targets)} labels in {home}; "
            "put matching files there"
        )
    return files


def _fetch(kind: Any, directory: Path, folder: str, names: Sequence[str], archives: Sequence[str]) -> None:
    # Unpack to a temporary directory and move the files, so that no reader ever finds an incomplete dataset.
    existing = next(parent for parent in (directory, *directory.parents) if parent.is_dir())
    with tempfile.TemporaryDirectory(dir=existing, prefix=".download-") as name:
        staging = Path(name)
        for archive in archives:
            if (directory / archive).is_file():
                (staging / archive).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(directory / archive, staging / archive)
        # Progress bars and messages about mirrors would be printed once per rank; the error contains what matters.
        quiet = io.StringIO()
        with redirect_stdout(quiet), redirect_stderr(quiet), _connect_timeout(CONNECT_TIMEOUT_S):
            kind(staging, download=True)
        (directory / folder).mkdir(parents=True, exist_ok=True)
        for file in names:
            os.replace(staging / folder / file, directory / folder / file)


@contextmanager
def _connect_timeout(seconds: float) -> Iterator[None]:
    # torchvision sets no timeout, and a host that drops packets would block the run for minutes per mirror.
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(seconds)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)


def _line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
