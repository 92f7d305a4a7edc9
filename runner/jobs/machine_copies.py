"""The copies of a run directory at an address on several machines, which do not share a file system."""

import time
from contextlib import suppress
from functools import partial
from pathlib import Path

from runner.checkpoints.layout import LAST, is_complete, list_checkpoints, verify
from runner.checkpoints.pull import pull
from runner.checkpoints.retention import remove, remove_leftovers
from runner.config.schema import Config
from runner.distributed.world import World
from runner.errors import InputError, JobFailed
from runner.jobs.mirrored_directory import address_of
from runner.records.run_directory import CHECKPOINTS, RunDirectory
from runner.remote.address import is_remote

DOWNLOADED_WITHIN_S = 3600.0
_PAUSE_S = 0.5


def synchronize_copies(directory: RunDirectory, config: Config, world: World) -> None:
    """Download the checkpoint that the run continues from to each machine, and mirror what its ranks write.

    Do nothing if `outputs=` is no address, or if all machines see the directory of rank 0, which has locked it. All
    ranks must call it. Raise InputError on all ranks if a download fails.
    """
    if not is_remote(config.outputs) or world.world_size == world.rank_info.local_world_size:
        return
    lock = world.consensus.broadcast("lock", directory.describe_lock)
    is_separate = not directory.is_locked_as(*lock)
    directory.is_shared = not world.consensus.first_error("separate", ["yes"] * is_separate)
    if directory.is_shared:
        return
    with world.consensus.waiting_longer(DOWNLOADED_WITHIN_S):
        if directory.writes:
            directory.complete = partial(_complete, directory.path, config)
        newest = world.consensus.broadcast("newest", lambda: _complete_newest(directory.path, config))
        messages = list[str]()
        if is_separate and world.rank_info.local_rank == 0:
            try:
                _download(directory, newest, config)
            except InputError as error:
                messages = error.messages
        if messages := world.consensus.first_error("copies", messages):
            raise InputError(*messages)


def _complete_newest(path: Path, config: Config) -> str | None:
    """Download the files of the newest checkpoint that other machines have written. Return its name."""
    pull_copy(path, config, LAST, is_locked=True)
    for checkpoint in list_checkpoints(path / CHECKPOINTS)[::-1]:
        with suppress(ValueError):
            verify(checkpoint)
            return checkpoint.name
        if not is_complete(checkpoint):
            remove(checkpoint)  # an earlier attempt has not completed it on all machines
    return None


def _complete(path: Path, config: Config, checkpoint: Path) -> None:
    """Download the files of a checkpoint that other machines have written. Raise JobFailed if they are not uploaded."""
    if not is_complete(checkpoint):
        try:
            _download_uploaded(path, config, checkpoint.name)
        except InputError as error:
            raise JobFailed(str(error)) from None


def _download_uploaded(path: Path, config: Config, name: str) -> None:
    """Download a checkpoint once other machines have uploaded it. Raise InputError after remote.patience_s."""
    deadline, problems = time.monotonic() + config.remote.patience_s, list[str]()
    while True:
        try:
            pull_copy(path, config, name, is_locked=True)
            if is_complete(path / CHECKPOINTS / name):
                return
        except InputError as error:  # the store may be unavailable for a while
            problems = error.messages
        if time.monotonic() > deadline:
            patience = f"{config.remote.patience_s:g} s (remote.patience_s)"
            missing = f"{address_of(path, config)}: its checkpoint {name} was not uploaded within {patience}"
            raise InputError(missing, *problems)
        time.sleep(_PAUSE_S)


def _download(directory: RunDirectory, newest: str | None, config: Config) -> None:
    """Make the directory a copy of that of rank 0, with its newest checkpoint only, and start its mirror."""
    pull_copy(directory.path, config)
    if newest is not None:
        _download_uploaded(directory.path, config, newest)
    directory.path.mkdir(parents=True, exist_ok=True)
    for checkpoint in list_checkpoints(directory.checkpoints):
        if checkpoint.name != newest:
            remove(checkpoint)
    remove_leftovers(directory.checkpoints)
    assert directory.mirror is not None
    directory.mirror.begin(directory.path, address_of(directory.path, config), is_part=True)


def pull_copy(path: Path, config: Config, *checkpoints: str, is_locked: bool = False) -> None:
    """Download what the local copy of a run lacks, as `pull` does; nothing if the run is not remote yet."""
    options, address = config.remote.options or {}, str(address_of(path, config))
    pull(address, "outputs", checkpoints, options, directory=path, is_optional=True, is_locked=is_locked)
