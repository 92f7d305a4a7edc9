"""Experiments from a script or a notebook: `compose`, `train` and `sweep`, which work as the command does."""

import os
import signal
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from runner.api.runs import Run, open_run, runs
from runner.config.command import composing, prepare
from runner.config.custom_dirs import absolute_dirs, fresh_imports
from runner.config.schema import Config
from runner.distributed.environment import RankInfo, find_rank_info, is_run_in_progress
from runner.errors import InputError, JobFailed, Preempted
from runner.records.run_record import DONE
from runner.sweeps.queues import read_jobs_and_queues

EMBEDDED = RankInfo(is_embedded=True)

Directories = str | Path | Sequence[str | Path]


def compose(overrides: Iterable[str] = (), config_dirs: Directories = ()) -> Config:
    """Return the whole configuration, with the checks of a command, without running anything.

    Raise InputError, which lists every wrong override.

    Args:
        overrides: the overrides as on the command line, for example ["model=mlp", "optimizer.lr=0.1"].
        config_dirs: one or several custom directories, as for --config-dir.
    """
    with (
        _call("compose", overrides, config_dirs) as (texts, directories),
        composing(texts, directories, multirun=False) as arguments,
    ):
        return prepare(arguments, EMBEDDED, ()).config


def train(overrides: Iterable[str] = (), config_dirs: Directories = ()) -> Run:
    """Run one experiment to its end, as `python -m runner` does, and return the run.

    Another task can be chosen if it is a single run. Raise InputError (nothing was written), JobFailed, or Preempted if
    a signal or an interrupt of the notebook stopped the run after it had saved. The attribute `directory` of JobFailed
    and Preempted is the run directory. The arguments are those of `compose`.
    """
    from runner.jobs.task import launches_jobs
    from runner.launchers.launch import launch, make_launcher

    with _call("train", overrides, config_dirs) as (texts, directories), TemporaryDirectory() as temporary:
        directory_file = Path(temporary, "directory")
        try:
            with composing(texts, directories, multirun=False) as arguments:
                request = prepare(arguments, EMBEDDED, _command(texts, directories))
                launcher = make_launcher(request.config.launcher, request.config.debug)
                if launches_jobs(request.config.task):
                    raise InputError(f"task={request.command.choices['task']} is not a single run; run it in a shell")
                if launcher.queues or launcher.started_on_each:
                    name = request.command.choices["launcher"]
                    raise InputError(f"launcher={name} also runs on other machines; run it in a shell")
                destination = replace(request.destination, file=str(directory_file))
                launch(replace(request, destination=destination), EMBEDDED, launcher)
        except (JobFailed, Preempted) as error:
            error.directory = directory_file.read_text() if directory_file.exists() else ""
            raise
        return open_run(directory_file.read_text())


def sweep(overrides: Iterable[str] = (), config_dirs: Directories = ()) -> list[Run]:
    """Run a sweep to its end, as `python -m runner -m` does, and return the runs of its jobs in their order.

    The arguments are those of `compose`, with several values for some keys. The exceptions are those of `train`.
    JobFailed is raised after all jobs were tried if some are not done; `runner.runs(error.directory)` returns the runs.
    """
    from runner.sweeps.run_sweep import run_sweep

    with _call("sweep", overrides, config_dirs) as (texts, directories):
        with composing(texts, directories, multirun=True) as arguments:
            directory, status = run_sweep(arguments, EMBEDDED, _command(texts, directories, "-m"))
        assert directory is not None  # launcher.dry_run=true was refused
        if status:
            jobs = read_jobs_and_queues(Path(directory))
            unfinished = [f"{job.label} {job.state}" for job in jobs if job.state not in DONE]
            summary = f"{len(unfinished)} of {len(jobs)} jobs are not done ({', '.join(unfinished)})"
            raise JobFailed(f"{summary}: {directory}", status, directory)
        return runs(directory)


@contextmanager
def _call(name: str, overrides: Iterable[str], config_dirs: Directories) -> Iterator[tuple[list[str], list[str]]]:
    """Yield the overrides and the absolute directories of a call, and restore the state of the process on exit.

    Raise InputError if the arguments are invalid, or if no run can start in this process.
    """
    called = f"runner.{name}"
    _check_process(called)
    if isinstance(overrides, str):
        raise InputError(f"{called}({overrides!r}): the overrides must be a list; use {called}({overrides.split()!r})")
    texts = list(overrides)
    if flags := [text for text in texts if text.startswith("-")]:
        raise InputError(f"{called}: {flags[0]} is a flag; use runner.sweep for -m, and config_dirs= for --config-dir")
    directories = [config_dirs] if isinstance(config_dirs, (str, Path)) else list(config_dirs)
    for directory in directories:
        if not Path(directory).is_dir():
            raise InputError(f"config_dirs: {directory} is not a directory; name the one with your model/*.yaml")
    from runner.jobs.process_state import embedded_run  # imports torch, so it follows the checks

    try:
        with embedded_run(), fresh_imports():
            if os.getcwd() not in sys.path and "" not in sys.path:
                sys.path.append(os.getcwd())  # as a command does
            yield texts, absolute_dirs(map(str, directories))
    except InputError as error:
        flag, function = "a sweep needs -m", "a sweep needs runner.sweep"
        raise InputError(*(message.replace(flag, function) for message in error.messages)) from None
    except SystemExit as error:  # a signal arrived while there was no run to save
        number = (error.code if isinstance(error.code, int) else 0) - 128
        if number not in list(signal.Signals):
            raise
        raise Preempted(signal.Signals(number).name) from None


def _check_process(called: str) -> None:
    """Raise InputError if no run can start in this process."""
    if is_run_in_progress() or find_rank_info().world_size > 1:
        raise InputError(f"{called} starts a new run, but this process is part of one; call it outside of any run")
    if threading.current_thread() is not threading.main_thread():
        raise InputError(f"{called} must be called in the main thread, which handles signals; start a process for it")


def _command(overrides: Iterable[str], config_dirs: Iterable[str], *flags: str) -> list[str]:
    """Return the equivalent command."""
    return [sys.executable, "-m", "runner", *flags, *(f"--config-dir={path}" for path in config_dirs), *overrides]
