"""The directory of a job: a new one, or that of the run that it resumes; its checks, lock and past evaluations."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runner.checkpoints.layout import (
    MANIFEST,
    TrainState,
    check_regular,
    choose_checkpoint,
    list_checkpoints,
    read_manifest,
    step_of,
)
from runner.config.changes import changed_since, differs_from
from runner.config.request import Request
from runner.distributed.world import World
from runner.errors import InputError, as_input_error, describe_system_error
from runner.input.stream import UNKNOWN_LENGTH
from runner.jobs.machine_copies import pull_copy, synchronize_copies
from runner.jobs.mirrored_directory import address_of
from runner.records.loggers.dashboard import read_ids
from runner.records.monitor import Monitor
from runner.records.run_directory import CHECKPOINTS, RunDirectory, new_directory
from runner.records.run_files import METRICS, check_links, copy_file, read_mapping, read_metrics
from runner.records.run_lock import DEAD_AFTER_S
from runner.records.run_record import DONE, RESULT, find_run
from runner.records.settings import CONFIG, OVERRIDES
from runner.remote.address import is_remote
from runner.training.build import Experiment


def count_samples(experiment: Experiment | None) -> dict[str, int]:
    """Return the number of samples of each split whose length is known; empty without an experiment."""
    if experiment is None:
        return {}
    loaders = {"train": experiment.train_loader, "val": experiment.val_loader}
    counts = {split: loader.sampler.num_samples for split, loader in loaders.items()}
    return {split: count for split, count in counts.items() if count < UNKNOWN_LENGTH}


def check_directory(directory: str | None, experiment: Experiment | None, resume_force: bool) -> list[str]:
    """Return the reasons why the job cannot resume the run in `directory`, which is None for a new run."""
    if directory is None:
        return []
    path = Path(directory)
    try:
        check_links(path)
        before = read_mapping(path / RESULT) if (path / RESULT).exists() else {}
        read_ids(path)
        list(read_metrics(path))
    except InputError as error:
        return error.messages
    recorded, now = before.get("samples"), count_samples(experiment).get("train")
    then = recorded.get("train") if isinstance(recorded, dict) else None
    has_changed = type(then) is int and now is not None and then != now
    if not has_changed or resume_force or not list_checkpoints(path / CHECKPOINTS):
        return []
    return [
        f"data: there are {now:,} training samples, and the run in {path} was trained with {then:,}, on which its "
        "steps depend; restore the data, or add resume_force=true"
    ]


def copy_start(checkpoint: Path, directory: Path) -> None:
    """Copy a verified checkpoint, and the metrics of its run, into the directory of a new run, which continues there.

    If the file system permits, the files of the checkpoint are hard links, because these files never change. Only the
    files that its manifest lists are copied.
    """
    partial = directory / CHECKPOINTS / f"{checkpoint.name}.fork"
    shutil.rmtree(partial, ignore_errors=True)  # left by a job that was killed while it copied
    partial.mkdir(parents=True)
    check_regular(checkpoint)
    for name in (MANIFEST, *read_manifest(checkpoint)):
        try:
            os.link(checkpoint / name, partial / name)
        except OSError:
            copy_file(checkpoint / name, partial / name)
    if not (directory / CHECKPOINTS / checkpoint.name).exists():
        partial.rename(directory / CHECKPOINTS / checkpoint.name)
    shutil.rmtree(partial, ignore_errors=True)
    with suppress(FileNotFoundError):
        copy_file(checkpoint.parent.parent / METRICS, directory / METRICS)


def find_finished(request: Request) -> dict[str, float] | None:
    """Return the metrics of the run that `run_id` names, and print that it is finished; None for other runs."""
    config, directory, file = request.config, request.destination.directory, request.destination.file
    if not (config.run_id and directory) or config.resume or config.resume_force:
        return None
    run = find_run(Path(directory))
    if run.state not in DONE or differs_from(run.directory, config):
        return None
    if file is not None:
        Path(file).write_text(directory)  # for the caller from Python
    print(f"run_id={config.run_id} is {run.state}: {directory}", flush=True)
    return run.metrics


def agree_on_directory(request: Request, world: World) -> Path:
    """Return the run directory, which rank 0 creates for a new run. All ranks must call it.

    Raises InputError if it cannot be created, or if the run of `fork=` has no such checkpoint, or only damaged ones.
    """
    config, destination, outputs = request.config, request.destination, request.config.local_outputs

    def relative(path: str) -> str:
        is_copy = is_remote(config.outputs) and Path(path).is_relative_to(outputs)
        return str(Path(path).relative_to(outputs)) if is_copy else path  # each machine may have its copies elsewhere

    def create() -> str:
        if before := world.consensus.before_restart("directory"):
            if is_remote(config.outputs) and not Path(before).exists():  # rank 0 was on another machine
                pull_copy(Path(before), config)
            return relative(before)
        start = None
        if config.fork and not (destination.directory and Path(destination.directory, OVERRIDES).exists()):
            with as_input_error(f"fork={config.fork}: "):
                start = choose_checkpoint(Path(config.fork, CHECKPOINTS), config.checkpoint.load)
        try:
            directory = destination.directory or str(new_directory(outputs, config.name))
            os.makedirs(directory, exist_ok=True)
            if start is not None:
                copy_start(start, Path(directory))
        except (ValueError, OSError) as error:
            reason = f"cannot create a run directory there ({error}); name another directory"
            raise InputError(f"outputs={config.outputs}: {reason}") from None
        return relative(directory)

    path = str(Path(outputs, world.consensus.broadcast("directory", create)))
    world.consensus.keep_for_restart("directory", path)
    if world.rank_info.local_rank == 0 and destination.file is not None:
        Path(destination.file).write_text(path)  # for the launcher of each machine
    return Path(path)


@contextmanager
def locked(directory: RunDirectory, request: Request, world: World) -> Iterator[None]:
    """Lock the run directory for this world. All ranks must call it.

    Raise InputError if another world has locked it. A world that its agent has restarted takes over its own lock.
    """

    def lock() -> str:
        before = world.consensus.before_restart("locked")
        number = int(before) if before is not None else None
        changed: dict[str, list[Any]] = {}
        with suppress(InputError):  # an earlier attempt left a damaged file, which is replaced
            changed = changed_since(directory.path, request.config) if (directory.path / CONFIG).exists() else {}
        try:
            directory.lock(
                number,
                hosts=world.local_ranks.hosts(),
                world_size=world.world_size,
                parallel=request.command.choices["parallel"],
                changed=changed,
            )
            if directory.mirror is not None and not directory.mirror.address:  # otherwise begun in an earlier world
                directory.mirror.begin(directory.path, address_of(directory.path, request.config))
        except InputError:
            directory.release()
            raise
        except (OSError, RuntimeError) as error:
            raise InputError(describe_system_error(error) or f"{directory.path} cannot be locked: {error}") from None
        return str(directory.attempt.number)

    wait_s = 2 * DEAD_AFTER_S  # for the heartbeat of an owner on another machine
    if is_remote(request.config.outputs):
        wait_s += request.config.remote.patience_s  # for the uploads of a run that was killed
    try:
        with as_input_error(), world.consensus.waiting_longer(wait_s):
            world.consensus.keep_for_restart("locked", world.consensus.broadcast("locked", lock))
    except BaseException:  # another rank was lost meanwhile
        directory.release()
        raise
    try:
        synchronize_copies(directory, request.config, world)
        yield
    finally:
        directory.release()


@dataclass(frozen=True)
class PastEvaluations:
    """The evaluations of a resumed run, equal on all ranks; a new run has none."""

    values: dict[int, float]  # of the monitor, by step
    checkpoints: list[int]  # the steps of the checkpoints on disk

    def is_evaluation_due(self, state: TrainState, every_epochs: int, every_steps: int | None) -> bool:
        """Return True if the run stopped before an evaluation that was due."""
        at_epoch_end = not state.step_in_epoch and state.epoch % every_epochs == 0
        at_step = every_steps is not None and state.step % every_steps == 0
        is_due = state.step > 0 and (at_epoch_end or at_step)
        return is_due and not state.evaluated and max(self.values, default=0) < state.step


def read_past_evaluations(directory: RunDirectory, monitor: Monitor, world: World) -> PastEvaluations:
    """Read the evaluations on rank 0 and send them to the others. All ranks must call it."""

    def read() -> list[Any]:
        checkpoints = [step_of(path) for path in list_checkpoints(directory.checkpoints)]
        values = directory.evaluations(monitor.name) if checkpoints else {}
        return [list(values.items()), checkpoints]

    values, checkpoints = world.consensus.broadcast("past_evaluations", read)
    return PastEvaluations(dict(values), checkpoints)
