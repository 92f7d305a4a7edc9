"""Directories that a command writes under an address: runs, sweeps, and the results of tasks that launch jobs."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from runner.config.schema import Config
from runner.errors import InputError
from runner.remote.address import Address, is_remote
from runner.remote.mirror_process import MirrorProcess, report_left

_mirrors: dict[Path, MirrorProcess] = {}  # of the sweeps and tasks of this process, by directory


def address_of(directory: Path, config: Config) -> Address:
    """Return the address to which a directory is mirrored. Raise InputError if it is a copy in another place."""
    outputs = Path(config.local_outputs)
    if not directory.is_relative_to(outputs):
        raise InputError(
            f"outputs={config.outputs}: {directory} is not its local copy, which is in {outputs}; resume the address"
        )
    return Address.parse(config.outputs) / directory.relative_to(outputs).as_posix()


def begin_mirror(path: Path, config: Config) -> None:
    """Mirror the directory of a sweep or a task if `outputs=` is an address. Raise InputError as `MirrorProcess`."""
    if is_remote(config.outputs):
        mirror = MirrorProcess(config.outputs, config.remote.options or {}, config.remote.patience_s)
        mirror.begin(path, address_of(path, config))
        _mirrors[path] = mirror


def end_mirror(path: Path, is_successful: bool, is_discarded: bool = False) -> None:
    """Upload what is left of the directory. Raise JobFailed if that fails and the command was successful.

    is_discarded: delete what was uploaded instead.
    """
    if path in _mirrors:
        report_left(_mirrors.pop(path).end(is_discarded), is_successful)


@contextmanager
def mirroring(path: Path, config: Config) -> Iterator[None]:
    """Mirror the directory, as `begin_mirror` does, for the duration of the context."""
    is_successful = False
    begin_mirror(path, config)
    try:
        yield
        is_successful = True
    finally:
        end_mirror(path, is_successful)
