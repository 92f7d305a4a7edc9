"""The code of a job that waits in a queue, frozen in an archive when the job is submitted, or only remembered.

`code-HASH.tar` in the directory of the run, or of the sweep, whose jobs share it, contains `installed/` (the runner),
`own/` (the directories of --config-dir), `imported/` (other modules that were imported to validate the configuration),
`git.diff` and `code.json` (a CodeState). HASH is the start of the file's SHA-256, which a job checks before it extracts
the archive. A large file that is not code is a link to the original.
"""

import hashlib
import io
import json
import tarfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from runner.errors import InputError
from runner.records.code_state import (
    ARCHIVE,
    CODE_SUFFIXES,
    STATE,
    CodeState,
    custom_sources,
    files_of,
    hash_files,
    to_json,
)
from runner.records.ledger import is_sweep
from runner.records.provenance import DIFF, git_diff, git_state
from runner.records.record_files import write_atomically

EXTRACTED = Path("slurm") / "code"  # where a job extracts the archive, in the directory of its run
MAX_SIZE = 1 << 20  # bytes, of a file that is not code; a larger one is a link
MAX_FILES, MAX_BYTES = 5_000, 100 << 20  # of a custom directory


@dataclass(frozen=True)
class FrozenCode:
    """The archive with the code of a job."""

    path: Path
    sha256: str
    config_dirs: list[str]  # the archive paths of the given directories
    since: str
    changed: list[str]  # files that have changed since


def take_state(config_dirs: Sequence[str]) -> CodeState:
    """Return the current state of the code. `config_dirs` are absolute paths."""
    places = {name: str(path) for name, path in custom_sources(config_dirs).items()}
    state = CodeState(time.strftime("%Y-%m-%dT%H:%M:%S"), git_state(), places, {})
    return replace(state, files=hash_files(state.sources()))


def remember(directory: Path, state: CodeState) -> Path:
    """Save the state of the code for jobs submitted from the directory, but not the code. Return the file."""
    # Jobs may wait with different states, so each state has its file.
    path = directory / "slurm" / f"code-{state.sha256[:12]}.json"
    path.parent.mkdir(exist_ok=True)
    write_atomically(path, to_json(state))
    return path


def freeze(directory: Path, config_dirs: Sequence[str], write: bool = True) -> FrozenCode:
    """Freeze the code in the directory of a run or a sweep, unless the directory already has frozen code.

    `config_dirs` are absolute paths. Raises InputError if one of them is too large or missing in the frozen code, or if
    the archive is damaged.
    """
    if not any(directory.glob(ARCHIVE)) and is_sweep(directory.parent):
        directory = directory.parent
    path, changed = next(directory.glob(ARCHIVE), None), []
    if path is not None:
        state = _read_state(path)
        changed = state.changed()
    else:
        state = take_state(config_dirs)
        _check_size(state)
        path = _write_archive(directory, state) if write else None
    by_source = {source: archive_path for archive_path, source in state.places.items()}
    if missing := [config_dir for config_dir in config_dirs if config_dir not in by_source]:
        raise InputError(
            f"--config-dir={missing[0]}: {path} does not have this directory; remove that file to freeze the code again"
        )
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest() if path else "HASH"
    archived = [by_source[config_dir] for config_dir in config_dirs]
    return FrozenCode(path or directory / "code-HASH.tar", sha256, archived, state.at, changed)


def _write_archive(directory: Path, state: CodeState) -> Path:
    # Listed before the archive exists, because a custom directory may contain the run directory.
    files = [found for archive_path, source in state.sources().items() for found in files_of(archive_path, source)]
    partial = directory / "code.tar.tmp"
    with tarfile.open(partial, "w", dereference=True) as archive:
        if state.git["dirty"]:
            _add_text(archive, DIFF, git_diff())
        _add_text(archive, STATE, to_json(state))
        for name, file in files:
            if _is_linked(file):
                link = tarfile.TarInfo(name)
                link.type, link.linkname = tarfile.SYMTYPE, str(file.resolve())
                archive.addfile(link)
            else:
                archive.add(file, name, recursive=False)
    return partial.replace(directory / f"code-{_hash(partial)}.tar")


def _add_text(archive: tarfile.TarFile, name: str, text: str) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(text.encode())
    archive.addfile(member, io.BytesIO(text.encode()))


def _read_state(path: Path) -> CodeState:
    """Return the state in an archive. Raises InputError if the archive is damaged."""
    try:
        if path.name != f"code-{_hash(path)}.tar":
            raise ValueError
        with tarfile.open(path) as archive:
            return CodeState(**json.load(archive.extractfile(STATE) or io.BytesIO()))
    except (OSError, ValueError, TypeError, KeyError, tarfile.TarError):
        raise InputError(
            f"launcher.code=frozen: {path} is damaged; restore it, or remove it to freeze the current code"
        ) from None


def _hash(path: Path) -> str:
    """Return the part of the archive's SHA-256 that is in its name."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:12]


def _check_size(state: CodeState) -> None:
    for archive_path, source in state.places.items():
        sizes = [file.stat().st_size for _, file in files_of(archive_path, Path(source)) if not _is_linked(file)]
        if len(sizes) > MAX_FILES or sum(sizes) > MAX_BYTES:
            raise InputError(
                f"launcher.code=frozen archives {source}, which has {len(sizes):,} small files of "
                f"{sum(sizes) / 2**20:.0f} MiB, more than {MAX_FILES:,} or {MAX_BYTES >> 20} MiB; move the data out of "
                "it, or set launcher.code=live"
            )


def _is_linked(file: Path) -> bool:
    return file.is_dir() or (file.suffix not in CODE_SUFFIXES and file.stat().st_size > MAX_SIZE)
