"""The code of a job that waits in a queue: kept as it is when the job is submitted, or only remembered by its hashes.

`code/` in the directory of the run, or of the sweep whose jobs share it, holds `installed/` (the runner), `own/` (the
folders of --config-dir), `imported/` (what else was imported to check the configuration), `git.diff`, `code.json` (a
CodeState), and SHA256SUMS, by which a job checks it. A large file that is no code is a link to where it was.
"""

import hashlib
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from runner.errors import InputError
from runner.runs.code_state import (
    FACTS,
    OWN,
    SUFFIXES,
    CodeState,
    files_of,
    hashes,
    places_of_imported,
    places_of_own,
    places_of_runner,
    read_state,
    to_json,
)
from runner.runs.ledger import is_sweep
from runner.runs.provenance import DIFF, git_diff, git_state
from runner.runs.run_directory import write_whole

FOLDER, SUMS = "code", "SHA256SUMS"
LARGE = 1 << 20  # bytes, of a file that is not copied unless it is code
MAX_FILES, MAX_BYTES = 5_000, 100 << 20  # that are copied of one of the user's folders


@dataclass(frozen=True)
class Frozen:
    """The code that a job is to run."""

    folder: Path
    config_dirs: list[str]  # those asked for, where they are in it
    since: str
    changed: list[str]  # files that are others by now than they are in it


def take_state(config_dirs: Sequence[str]) -> CodeState:
    """What the code is now. config_dirs: of the user's own, absolute."""
    users = {**places_of_own(config_dirs), **places_of_imported(config_dirs)}
    return _state(users, hashes({**places_of_runner(), **users}))


def remember(directory: Path, state: CodeState) -> Path:
    """Keep the state, and no code, for jobs submitted from the directory. Returns the file."""
    # Another state is another file: jobs may be waiting with each.
    path = directory / "slurm" / f"code-{state.sha256[:12]}.json"
    path.parent.mkdir(exist_ok=True)
    write_whole(path, to_json(state))
    return path


def freeze(directory: Path, config_dirs: Sequence[str], write: bool = True) -> Frozen:
    """Keep the code in the directory of a run or a sweep. One that is kept there already is taken as it is.

    config_dirs: of the user's own, absolute; those that are new to it are added. write: False shows what would be.
    Raises InputError where they are too much, and where what was kept is damaged.
    """
    of_sweep = not (directory / FOLDER).exists() and is_sweep(directory.parent)
    folder = (directory.parent if of_sweep else directory) / FOLDER
    if folder.exists():
        state = _checked(folder)
        known = [path for path in config_dirs if path in state.places.values() or Path(path).is_relative_to(folder)]
        new = places_of_own([path for path in config_dirs if path not in known], taken=len(state.places))
        _check_size(new)
        if new and write:
            state = _add(folder, state, new)
    else:
        new = {**places_of_own(config_dirs), **places_of_imported(config_dirs)}
        _check_size(new)
        state = _begin(folder, new) if write else _state(new, {})
    copies = {path: place for place, path in _text({**state.places, **new}).items() if place.startswith(f"{OWN}/")}
    own = [str(folder / copies[path]) if path in copies else path for path in config_dirs]
    return Frozen(folder, own, state.at, state.changed() if state.files else [])


def _begin(folder: Path, users: Mapping[str, Path]) -> CodeState:
    partial = folder.with_name(f"{folder.name}.tmp")
    shutil.rmtree(partial, ignore_errors=True)  # of a command that was killed
    places = {**places_of_runner(), **users}
    _copy(partial, places)
    state = _state(users, hashes({place: partial / place for place in places}))
    (partial / FACTS).write_text(to_json(state))
    if state.git["dirty"]:
        (partial / DIFF).write_text(git_diff())
    _write_sums(partial)
    partial.rename(folder)
    return state


def _add(folder: Path, state: CodeState, users: Mapping[str, Path]) -> CodeState:
    """Jobs that start meanwhile find what was there."""
    _copy(folder, users)
    added = hashes({place: folder / place for place in users})
    state = replace(state, places={**state.places, **_text(users)}, files={**state.files, **added})
    write_whole(folder / FACTS, to_json(state))
    _write_sums(folder)
    return state


def _checked(folder: Path) -> CodeState:
    """The state that was kept. Raises InputError where its files are not what they were."""
    damaged = FACTS
    try:
        state = read_state(folder / FACTS)
        damaged = SUMS
        for line in (folder / SUMS).read_text().splitlines():
            expected, damaged = line.split("  ", 1)
            if hashlib.sha256((folder / damaged).read_bytes()).hexdigest() != expected:
                raise ValueError
    except (OSError, ValueError, TypeError):
        raise InputError(
            f"launcher.code=frozen: {folder / damaged} is not what was kept when the job was submitted; restore it, or "
            f"remove {folder} to keep the code as it is now"
        ) from None
    return state


def _check_size(users: Mapping[str, Path]) -> None:
    messages = []
    for place, source in users.items():
        sizes = [file.stat().st_size for _, file in files_of(place, source) if not _is_linked(file)]
        if len(sizes) > MAX_FILES or sum(sizes) > MAX_BYTES:
            messages.append(
                f"launcher.code=frozen copies {source}, which has {len(sizes):,} small files of "
                f"{sum(sizes) / 2**20:.0f} MiB, more than {MAX_FILES:,} or {MAX_BYTES >> 20} MiB; move the data out of "
                "it, or type launcher.code=live"
            )
    if messages:
        raise InputError(*messages)


def _copy(target: Path, places: Mapping[str, Path]) -> None:
    # All of them before one is written: the target may be in one of the user's folders.
    for name, file in [found for place, source in places.items() for found in files_of(place, source)]:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        if _is_linked(file):
            (target / name).unlink(missing_ok=True)
            (target / name).symlink_to(file.resolve())
        else:
            shutil.copy2(file, target / name)


def _is_linked(file: Path) -> bool:
    return file.is_dir() or (file.suffix not in SUFFIXES and file.stat().st_size > LARGE)


def _write_sums(folder: Path) -> None:
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and not path.is_symlink()]
    names = [path.relative_to(folder).as_posix() for path in files if path.suffix != ".pyc"]
    lines = [
        f"{hashlib.sha256((folder / name).read_bytes()).hexdigest()}  {name}\n"
        for name in names
        if name not in (FACTS, SUMS)  # which change where a folder is added
    ]
    write_whole(folder / SUMS, "".join(lines))


def _state(users: Mapping[str, Path], files: dict[str, str]) -> CodeState:
    return CodeState(time.strftime("%Y-%m-%dT%H:%M:%S"), git_state(), _text(users), files)


def _text(places: Mapping[str, Path | str]) -> dict[str, str]:
    return {place: str(path) for place, path in places.items()}
