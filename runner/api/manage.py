"""Functions that label, stop and delete runs and sweeps, without importing torch.

`run` is a `Run`, the directory of a run, job or sweep, "last" (the newest run or sweep), or a unique prefix of a name
in the directory `outputs`. The functions raise InputError if no run has this name, or if its files are damaged.
"""

import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

from runner.errors import InputError, did_you_mean
from runner.records.finding import CELLS, find_records
from runner.records.labels import read_labels, write_labels
from runner.records.ledger import STOPPING, is_sweep, read_ledger, write_state
from runner.records.listing import Name, as_json, find_record, read_entry
from runner.records.run_lock import living_owner, lock_directory
from runner.records.run_record import find_run


def show(run: Name, outputs: Name = "outputs") -> dict[str, Any]:
    """Return what `runs show --json` prints: state, monitor, best and last value, labels, size, and result.json."""
    path = find_record(run, outputs)
    entry = read_entry(path, Path(outputs).absolute())
    return as_json(entry) | {"result": find_run(path).as_result()}


def tag(run: Name, *words: str, remove: bool = False, outputs: Name = "outputs") -> None:
    """Add tags to a run or sweep, or remove them. Raise InputError for an invalid tag, or a removed one if missing."""
    path = find_record(run, outputs)
    labels = read_labels(path)
    if remove and (missing := [word for word in words if word not in labels.tags]):
        raise InputError(f"{path} has no tag {missing[0]}{did_you_mean(missing[0], labels.tags)}")
    others = [tag for tag in labels.tags if tag not in words]
    write_labels(path, replace(labels, tags=others if remove else [*others, *dict.fromkeys(words)]))


def archive(run: Name, restore: bool = False, outputs: Name = "outputs") -> None:
    """Hide a run or sweep from `runs list`, or list it again. Raise InputError for a job of a sweep."""
    path = find_record(run, outputs)
    if is_sweep(path.parent):
        raise InputError(f"{path} is a job; archive its sweep, {path.parent}")
    write_labels(path, replace(read_labels(path), archived=not restore))


def stop(run: Name, outputs: Name = "outputs") -> int | None:
    """Send SIGTERM to the process of a run or sweep, which saves a checkpoint and exits, and return its id.

    If the run is a job, its sweep continues with the next job. A job that has not started has no process: its sweep
    skips it, and the function returns None.

    Raise InputError if the run is not in progress, or if its process is on another machine or of another user.
    """
    path = find_record(run, outputs, adds_jobs=True)
    owner = living_owner(path)
    jobs = read_ledger(path.parent) if is_sweep(path.parent) and living_owner(path.parent) else []
    job = next((job for job in jobs if job.directory == path), None)
    is_due = owner is None and job is not None and job.is_due
    if owner is None and not is_due:
        entry = read_entry(path, path.parent)
        queued = "; cancel its job in the queue" if any(run.state == "queued" for run in entry.runs) else ""
        raise InputError(f"{path} is not in progress ({entry.state}){queued}")
    if owner and (not owner.is_here or owner.pid is None):
        raise InputError(f"{path} runs on {owner.host}; log in there and type: python -m runner runs stop {path}")
    if owner and not owner.is_owner:
        raise InputError(f"{path}: its lock file and process {owner.pid} belong to different users; stop it yourself")
    if job is not None and job.stop_requested:
        raise InputError(f"{path} is stopping already; runs stop {path.parent} stops its sweep")
    try:
        if job is not None:  # its sweep continues with the next job
            write_state(path.parent, job.number, STOPPING)
        if owner and owner.pid:
            os.kill(owner.pid, signal.SIGTERM)
    except OSError as error:
        raise InputError(f"{path} cannot be stopped: {error.strerror}") from None
    return owner.pid if owner else None


def delete(run: Name, outputs: Name = "outputs") -> None:
    """Delete a run or sweep, without a confirmation.

    Raise InputError if it is in progress or queued, if it is a job of a sweep, or if a file cannot be deleted.
    """
    path = find_record(run, outputs)
    check_deletable(path)
    lock = lock_directory(path)  # so that no process starts in it
    try:
        check_deletable(path, ignored=os.getpid())
        shutil.rmtree(path)
    except OSError as error:
        raise InputError(f"{error.filename or path} cannot be deleted: {error.strerror or error}") from None
    finally:
        lock.release()


def check_deletable(path: Path, ignored: int | None = None) -> None:
    """Raise InputError for a job of a sweep, and for a run or sweep that is in progress or queued, or part of which is.

    ignored: a process whose locks do not count.
    """
    from runner.launchers.slurm.queue import last_job, query_ended

    if is_sweep(path.parent):
        raise InputError(f"{path} is a job, which the ledger of its sweep names; delete the sweep, {path.parent}")
    jobs = read_ledger(path) if is_sweep(path) else []
    parents = [path.parent.parent] if path.parent.name == CELLS else []  # the task=compare that has started the run
    below = [each for each, _ in find_records(path)]
    directories = list(dict.fromkeys([path, *(job.directory for job in jobs), *below, *parents]))
    for directory in directories:
        if (owner := living_owner(directory)) and not (owner.is_here and owner.pid == ignored):
            raise InputError(f"{directory} is in progress (process {owner.pid} on {owner.host}); type runs stop {path}")
    if any(job.state == "queued" for job in jobs):
        raise InputError(f"{path} has jobs in a queue; cancel them first")
    submitted = {job: directory for directory in directories if (job := last_job(directory))}
    ended = query_ended([*submitted])
    for job, directory in submitted.items():
        if job not in ended:
            raise InputError(f"{directory} may be in Slurm's queue (job {job}); cancel it first: scancel {job}")


def forks_of(path: Path, folder: Path) -> list[Path]:
    """Return the runs below `folder` that started from a checkpoint of the run, or of a job of the sweep, in `path`."""
    runs = [find_run(other) for other, is_sweep in find_records(folder) if not is_sweep]
    forks = [run.directory for run in runs if Path(run.parent or "").is_relative_to(path)]
    return [fork for fork in forks if not fork.is_relative_to(path)]
