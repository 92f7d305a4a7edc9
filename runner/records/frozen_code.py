"""The code of a job that waits in a queue, frozen in an archive when the job is submitted.

The archive `code-HASH.tar` is in the directory of the run, or of the sweep, whose jobs share it. It contains
`installed/` (the runner), `own/` (the directories of --config-dir), `imported/` (other modules that were imported to
validate the configuration), `git.diff` and `code.json` (a CodeState). HASH is the start of the archive's SHA-256, which
a job checks before it extracts the archive. For a large file that is not code, it contains a link.
"""

import fnmatch
import hashlib
import io
import json
import os
import re
import sys
import tarfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from runner.errors import InputError
from runner.records import provenance
from runner.records.custom_code import custom_file, runner_sources
from runner.records.ledger import is_sweep
from runner.records.provenance import INSTALLED, STATE, CodeState
from runner.records.run_files import dumps

# Directories of the archive, for the directories of --config-dir and for other imported modules.
CUSTOM, IMPORTED = "own", "imported"
ARCHIVE = "code-*.tar"
EXTRACTED = Path("slurm") / "code"  # where a job extracts the archive, in the directory of its run
CODE_SUFFIXES = (".py", ".yaml", ".yml")
RUNNER_SUFFIXES = (*CODE_SUFFIXES, ".typed")
# Files that identify a run, a sweep, extracted code or a virtual environment, none of which is custom code.
NO_CODE = ("overrides.yaml", "ledger.jsonl", STATE, "pyvenv.cfg")
MAX_SIZE = 1 << 20  # bytes; a larger file is archived as a link, unless it is code
MAX_FILES, MAX_BYTES = 5_000, 100 << 20  # of a custom directory


@dataclass(frozen=True)
class FrozenCode:
    """The archive with the code of a job."""

    path: Path
    sha256: str
    config_dirs: list[str]  # the archive paths of the given directories
    since: str  # the time at which the code was frozen
    is_new: bool  # False if an earlier submission has created the archive


def freeze(directory: Path, config_dirs: Sequence[str], write: bool = True) -> FrozenCode:
    """Archive the current code in the directory of a run or a sweep, or return the archive that is already there.

    `config_dirs` are absolute paths. Raises InputError if one of them is too large or missing in the archive, or if the
    archive is damaged. With `write=False`, a new archive is not written.
    """
    path = find_archive(directory)
    if path is None and is_sweep(directory.parent):
        directory = directory.parent
    if is_new := path is None:
        places = {name: str(path) for name, path in _custom_sources(config_dirs).items()}
        repositories = provenance.custom_repositories(config_dirs)
        state = CodeState(time.strftime("%Y-%m-%dT%H:%M:%S"), provenance.git_state(), repositories, places)
        _check_size(state)
        path = _write_archive(directory, state) if write else None
    else:
        state = _read_state(path)
    by_source = {source: archive_path for archive_path, source in state.places.items()}
    if missing := [config_dir for config_dir in config_dirs if config_dir not in by_source]:
        raise InputError(
            f"--config-dir={missing[0]}: {path} does not have this directory; remove that file to freeze the code again"
        )
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest() if path else "HASH"
    archived = [by_source[config_dir] for config_dir in config_dirs]
    return FrozenCode(path or directory / "code-HASH.tar", sha256, archived, state.at, is_new)


def find_archive(directory: Path) -> Path | None:
    """Return the archive in the directory of a run or a sweep, or in the directory of the run's sweep."""
    parents = (directory, directory.parent) if is_sweep(directory.parent) else (directory,)
    return next((path for parent in parents for path in parent.glob(ARCHIVE)), None)


def _write_archive(directory: Path, state: CodeState) -> Path:
    # Listed before the archive exists, because a custom directory may contain the run directory.
    installed = {f"{INSTALLED}/{name}": path for name, path in runner_sources().items()}
    sources = installed | {name: Path(source) for name, source in state.places.items()}
    files = [found for archive_path, source in sources.items() for found in _files_of(archive_path, source)]
    partial = directory / "code.tar.tmp"
    with tarfile.open(partial, "w", dereference=True) as archive:
        for name, diff in provenance.uncommitted_changes(state.git, state.repositories).items():
            if diff is not None:
                _add_text(archive, name, diff)
        _add_text(archive, STATE, dumps(asdict(state), indent=1))
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
        sizes = [file.stat().st_size for _, file in _files_of(archive_path, Path(source)) if not _is_linked(file)]
        if len(sizes) > MAX_FILES or sum(sizes) > MAX_BYTES:
            raise InputError(
                f"launcher.code=frozen archives {source}, which has {len(sizes):,} small files of "
                f"{sum(sizes) / 2**20:.0f} MiB, more than {MAX_FILES:,} or {MAX_BYTES >> 20} MiB; move the data out of "
                "it, or set launcher.code=live"
            )


def _is_linked(file: Path) -> bool:
    return file.is_dir() or (file.suffix not in CODE_SUFFIXES and file.stat().st_size > MAX_SIZE)


def _custom_sources(config_dirs: Sequence[str]) -> dict[str, Path]:
    """Return the directories of --config-dir, and other imported user modules and packages, by archive path."""
    directories = [Path(path) for path in config_dirs]
    names = [re.sub(r"[^A-Za-z0-9._-]+", ".", path.name) for path in directories]
    found = {f"{CUSTOM}/{n}-{name}": path for n, (name, path) in enumerate(zip(names, directories, strict=True))}
    for name in list(sys.modules):
        path = custom_file(name)
        if path is None:
            continue
        depth = name.count(".") + (path.stem == "__init__")
        top = path.parents[depth - 1] if depth else path  # the directory of the package, or the module's file
        # Modules below a directory of --config-dir are archived with it; a package that is this directory is not.
        if any(d in top.parents for d in directories) or not top.exists():
            continue
        if top.name.partition(".")[0] == name.partition(".")[0]:
            found.setdefault(f"{IMPORTED}/{top.name}", top)
    return found


def _files_of(archive_path: str, source: Path) -> Iterator[tuple[str, Path]]:
    """Yield the files of a source with their archive paths, and links to directories, which are not followed.

    Hidden files and directories, runs, sweeps, virtual environments and Python's caches are omitted. Of the runner,
    only code is included.
    """
    if source.is_file():
        yield archive_path, source
        return
    is_runner = archive_path.startswith(f"{INSTALLED}/")
    for path, directories, names in os.walk(source):
        here = Path(path)
        if here != source and (any(name in names for name in NO_CODE) or fnmatch.filter(names, ARCHIVE)):
            directories.clear()
            continue
        links = [name for name in directories if (here / name).is_symlink()]
        skipped = {*links, *fnmatch.filter(directories, ".*"), "__pycache__", "_shipped"}
        directories[:] = sorted(set(directories) - skipped)
        for name in sorted([*names, *links]):
            file = here / name
            if name.startswith(".") or (is_runner and file.suffix not in RUNNER_SUFFIXES):
                continue
            if file.is_file() or name in links:
                yield f"{archive_path}/{file.relative_to(source)}", file
