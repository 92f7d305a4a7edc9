"""The run directory that a job goes on in: whether it is one, and what has changed since the run began."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from runner.config.differences import changed_since
from runner.config.schema import Config
from runner.distributed.world import World
from runner.errors import InputError
from runner.runs.holder import DEAD_AFTER_S
from runner.runs.loggers.dashboard import IDS
from runner.runs.records import lines_of
from runner.runs.run_directory import CHECKPOINTS, CONFIG, RESULT, Request, RunDirectory
from runner.runs.shapes import read_mapping
from runner.runs.train_state import available
from runner.training.build import Experiment


def samples_of(experiment: Experiment | None) -> dict[str, int]:
    """How many there are of each split that is read; of a run that has an experiment."""
    if experiment is None:
        return {}
    loaders = {"train": experiment.train_loader, "val": experiment.val_loader}
    return {split: loader.sampler.num_samples for split, loader in loaders.items()}


def check_directory(directory: str | None, config: Config, experiment: Experiment | None) -> list[str]:
    """Why the job cannot go on there, one message. For rank 0, which reads and writes there. None: the run is new."""
    if directory is None:
        return []
    path = Path(directory)
    try:
        before = read_mapping(path / RESULT) if (path / RESULT).exists() else {}
        if (path / IDS).exists():
            read_mapping(path / IDS)
        for _ in lines_of(path):
            pass
    except InputError as error:
        return error.messages
    samples, now = before.get("samples"), samples_of(experiment).get("train")
    then = samples.get("train") if isinstance(samples, dict) else None
    if type(then) is not int or now is None or then == now or not available(path / CHECKPOINTS):
        return []
    if config.resume_force:
        return []
    return [
        f"data: there are {now:,} training samples, and the run in {path} was made with {then:,}, which "
        "its steps are made of; put the data back, or resume it with resume_force=true"
    ]


@contextmanager
def holding(directory: RunDirectory, config: Config, request: Request, world: World) -> Iterator[None]:
    """Meanwhile this world is the one that writes there. All ranks must call it.

    Raises InputError where another does. A world that its agent has started again takes over from itself.
    """

    def hold() -> str:
        before = world.agreement.made_before("held")
        again = int(before) if before is not None else None
        changed = _changes(directory.path, config)
        directory.hold(again, world_size=world.world_size, parallel=request.choices["parallel"], changed=changed)
        return str(directory.attempt.number)

    waits = world.agreement.timeout_s
    world.agreement.timeout_s = max(waits, 2 * DEAD_AFTER_S)  # for the heartbeat of a holder on another machine
    try:
        world.agreement.keep("held", world.agreement.share("held", hold))
    except ValueError as error:
        raise InputError(*str(error).splitlines()) from None
    finally:
        world.agreement.timeout_s = waits
    try:
        yield
    finally:
        directory.release()


def _changes(directory: Path, config: Config) -> dict[str, list[Any]]:
    """By key, the value when the run began and the one now; none where nothing was recorded."""
    try:
        return changed_since(directory, config) if (directory / CONFIG).exists() else {}
    except InputError:  # of an earlier attempt that has recorded nothing sound: it is replaced
        return {}
