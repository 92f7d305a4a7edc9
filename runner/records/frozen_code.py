"""The code of a job that waits in a queue, copied when the job is submitted, so that the job runs it as it was then.

The copy (runner.records.code_copy) contains `own/` (the directories of --config-dir), `imported/` (other modules that
were imported to validate the configuration), `installed/` (the runner, if it is installed from a checkout) and
`git.diff`. For a large file that is not code, it contains a link.
"""

import fnmatch
import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from runner.errors import InputError
from runner.paths import IS_CHECKOUT
from runner.records import provenance
from runner.records.code_copy import (
    CODE,
    ORIGIN,
    SUMS,
    Files,
    Origin,
    find_copies,
    new_copy,
    read_copy,
    time_of,
    write_copy,
)
from runner.records.custom_code import custom_file, runner_sources
from runner.records.run_files import dumps

# Directories of the copy: the directories of --config-dir, other imported modules, and the runner.
CUSTOM, IMPORTED, INSTALLED = "own", "imported", "installed"
CODE_SUFFIXES = (".py", ".yaml", ".yml")
RUNNER_SUFFIXES = (*CODE_SUFFIXES, ".typed")
# Files that identify a run, a sweep, a copy of code or a virtual environment, none of which is custom code.
NO_CODE = ("overrides.yaml", "ledger.jsonl", SUMS, "pyvenv.cfg")
MAX_SIZE = 1 << 20  # bytes; for a larger file, the copy has a link, unless the file is code
MAX_FILES, MAX_BYTES = 5_000, 100 << 20  # of a custom directory


@dataclass(frozen=True)
class FrozenCode:
    """The copy of the code of a job."""

    path: Path
    config_dirs: list[str]  # the copies of the given directories
    since: str | None  # the time of an earlier submission that has written the copy; None for a new copy


def freeze_code(directory: Path, config_dirs: Sequence[str], write: bool = True) -> FrozenCode:
    """Copy the current code to the directory of a run or a sweep, or return the copy that is already there.

    `config_dirs` are absolute paths. Raises InputError if one of them is too large or missing in the copy, or if the
    copy is damaged. With `write=False`, a new copy is not written.
    """
    if (path := find_frozen(directory)) is not None:
        origin, since = _read_origin(path), time_of(path)
    else:
        places = {name: str(source) for name, source in _custom_sources(config_dirs).items()}
        origin = Origin(provenance.git_state(), provenance.custom_repositories(config_dirs), places)
        _check_size(origin)
        files, since = _files(origin), None
        path = write_copy(directory, files) if write else new_copy(directory, files)
    by_source = {source: name for name, source in origin.places.items()}
    if missing := [config_dir for config_dir in config_dirs if config_dir not in by_source]:
        raise InputError(
            f"--config-dir={missing[0]}: {path} does not have this directory; remove that copy to freeze the code again"
        )
    return FrozenCode(path, [str(path / by_source[config_dir]) for config_dir in config_dirs], since)


def code_files(config_dirs: Sequence[str]) -> list[Path]:
    """Return the Python files of the directories, and those of other custom modules that have been imported."""
    found = {file for path in config_dirs for _, file in _files_of(CUSTOM, Path(path)) if file.suffix == ".py"}
    imported = (custom_file(name) for name in list(sys.modules))
    return sorted(found | {file for file in imported if file is not None and file.is_file()})


def find_frozen(directory: Path) -> Path | None:
    """Return the copy of an earlier submission in the directory of a run or a sweep, or of the run's sweep."""
    return next((path for path in find_copies(directory) if (path / ORIGIN).exists()), None)


def _files(origin: Origin) -> Files:
    """Return the files of the copy with this origin."""
    changes = provenance.uncommitted_changes(origin.git, origin.repositories)
    files: dict[str, bytes | Path] = {name: diff.encode() for name, diff in changes.items() if diff is not None}
    files[ORIGIN] = dumps(asdict(origin), indent=1).encode()
    installed = {f"{INSTALLED}/{name}": path for name, path in runner_sources().items()} if IS_CHECKOUT else {}
    for place, source in {**installed, **{name: Path(path) for name, path in origin.places.items()}}.items():
        for name, file in _files_of(place, source):
            files[name] = file.resolve() if _is_linked(file) else file.read_bytes()
    return files


def _read_origin(path: Path) -> Origin:
    """Return the origin of a copy. Raises InputError if the copy is damaged."""
    try:
        return Origin(**json.loads(read_copy(path)[ORIGIN]))
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise InputError(
            f"launcher.code=frozen: {path} is damaged ({error}); restore it, or remove it to freeze the current code"
        ) from None


def _check_size(origin: Origin) -> None:
    for place, source in origin.places.items():
        sizes = [file.stat().st_size for _, file in _files_of(place, Path(source)) if not _is_linked(file)]
        if len(sizes) > MAX_FILES or sum(sizes) > MAX_BYTES:
            raise InputError(
                f"launcher.code=frozen copies {source}, which has {len(sizes):,} small files of "
                f"{sum(sizes) / 2**20:.0f} MiB, more than {MAX_FILES:,} or {MAX_BYTES >> 20} MiB; move the data out of "
                "it, or set launcher.code=live"
            )


def _is_linked(file: Path) -> bool:
    return file.is_dir() or (file.suffix not in CODE_SUFFIXES and file.stat().st_size > MAX_SIZE)


def _custom_sources(config_dirs: Sequence[str]) -> dict[str, Path]:
    """Return the directories of --config-dir, and other imported user modules and packages, by path in the copy."""
    directories = [Path(path) for path in config_dirs]
    names = [re.sub(r"[^A-Za-z0-9._-]+", ".", path.name) for path in directories]
    found = {f"{CUSTOM}/{n}-{name}": path for n, (name, path) in enumerate(zip(names, directories, strict=True))}
    for name in list(sys.modules):
        path = custom_file(name)
        if path is None:
            continue
        depth = name.count(".") + (path.stem == "__init__")
        top = path.parents[depth - 1] if depth else path  # the directory of the package, or the module's file
        # Modules below a directory of --config-dir are copied with it; a package that is this directory is not.
        if any(d in top.parents for d in directories) or not top.exists():
            continue
        if top.name.partition(".")[0] == name.partition(".")[0]:
            found.setdefault(f"{IMPORTED}/{top.name}", top)
    return found


def _files_of(place: str, source: Path) -> Iterator[tuple[str, Path]]:
    """Yield the files of a source with their paths in the copy, and links to directories, which are not followed.

    Hidden files and directories, runs, sweeps, virtual environments and Python's caches are omitted. Of the runner,
    only code is included.
    """
    if source.is_file():
        yield place, source
        return
    is_runner = place.startswith(f"{INSTALLED}/")
    for path, directories, names in os.walk(source):
        here = Path(path)
        is_waiting = CODE in directories and find_frozen(here) is not None  # a run that has not started
        if here != source and (is_waiting or any(name in names for name in NO_CODE)):
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
                yield f"{place}/{file.relative_to(source)}", file
