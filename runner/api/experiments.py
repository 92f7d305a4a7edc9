"""Experiments from a script or a notebook: `compose`, `train` and `sweep`, by the path that a command takes."""

import os
import signal
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from runner.api.past import Run, open_run, runs
from runner.command import composing, prepare
from runner.config.own_folders import absolute, importing_anew
from runner.config.schema import Config
from runner.distributed.environment import RankInfo, find_rank_info
from runner.distributed.occupied import is_occupied
from runner.errors import InputError, JobFailed, Preempted
from runner.runs.ledger import DONE
from runner.sweeps.queue_state import read_standing

GUEST = RankInfo(is_guest=True)

Folders = str | Path | Sequence[str | Path]


@dataclass(frozen=True)
class _Words:
    """What is asked for, as the command line has it."""

    overrides: list[str]
    config_dirs: list[str]

    def command(self, *flags: str) -> list[str]:
        """The command that does the same."""
        folders = [f"--config-dir={folder}" for folder in self.config_dirs]
        return [sys.executable, "-m", "runner", *flags, *folders, *self.overrides]


def compose(words: Iterable[str] = (), config_dirs: Folders = ()) -> Config:
    """The whole configuration that the words make, checked as a command checks it; nothing runs.

    words: overrides as typed, as ["model=mlp", "optimizer.lr=0.1"]. config_dirs: folders of your own, as --config-dir
    names them. Raises InputError for every wrong word.
    """
    with (
        _visiting("compose", words, config_dirs) as asked,
        composing(asked.overrides, asked.config_dirs, multirun=False) as typed,
    ):
        return prepare(typed, GUEST, ())[0]


def train(words: Iterable[str] = (), config_dirs: Folders = ()) -> Run:
    """Run one experiment to its end, as `python -m runner WORDS` does. Returns the run.

    words, config_dirs: as of `compose`; another task than train may be chosen among them, if it is one run. Raises
    InputError (nothing was written), JobFailed, or Preempted, when a signal or an interrupt of the notebook has
    stopped it after saving; `directory` of the latter two is the run's.
    """
    from runner.launchers.launch import launch, make_launcher
    from runner.launchers.task import launches_jobs

    with _visiting("train", words, config_dirs) as asked, TemporaryDirectory() as folder:
        told = Path(folder, "directory")
        try:
            with composing(asked.overrides, asked.config_dirs, multirun=False) as typed:
                config, request = prepare(typed, GUEST, asked.command())
                launcher = make_launcher(config)
                if launches_jobs(config):
                    raise InputError(f"task={request.choices['task']} is no run by itself; {_in_a_shell(asked)}")
                if launcher.queues or launcher.started_on_each:
                    raise InputError(
                        f"launcher={request.choices['launcher']} has this run elsewhere too, and runner.train waits "
                        f"for what runs here; {_in_a_shell(asked)}"
                    )
                launch(config, replace(request, tells=str(told)), GUEST, launcher)
        except (JobFailed, Preempted) as error:
            error.directory = told.read_text() if told.exists() else ""
            raise
        return open_run(told.read_text())


def sweep(words: Iterable[str] = (), config_dirs: Folders = ()) -> list[Run]:
    """Run a sweep to its end, as `python -m runner -m WORDS` does. Returns its jobs' runs, in their order.

    words, config_dirs: as of `compose`, keys with several values among the words. Raises as `train` does: JobFailed
    when all jobs have been tried and some are not done, whose runs `runner.runs(error.directory)` lists.
    """
    from runner.sweeps.start import run_sweep

    with _visiting("sweep", words, config_dirs) as asked:
        with composing(asked.overrides, asked.config_dirs, multirun=True) as typed:
            swept = run_sweep(typed, GUEST, asked.command("-m"))
        assert swept.directory is not None  # what only shows jobs is refused in here
        jobs = read_standing(Path(swept.directory))
        undone = [f"{job.label} {job.state}" for job in jobs if job.state not in DONE]
        if swept.status:
            what = f"{len(undone)} of {len(jobs)} jobs are not done ({', '.join(undone)})"
            raise JobFailed(f"{what}: {swept.directory}", swept.status, swept.directory)
        return runs(swept.directory)


@contextmanager
def _visiting(name: str, words: Iterable[str], config_dirs: Folders) -> Iterator[_Words]:
    """What is asked for, in a process that is as before afterwards. Raises InputError where no run can be here."""
    called = f"runner.{name}"
    rank_info = find_rank_info()
    if is_occupied() or rank_info.world_size > 1:
        where = "in this process" if is_occupied() else f"as rank {rank_info.rank} of {rank_info.world_size}"
        raise InputError(
            f"{called} starts a run of its own, and one is running {where} already; call it outside of any"
        )
    if threading.current_thread() is not threading.main_thread():
        raise InputError(f"{called} must be called in the main thread, which signals reach; start a process for it")
    asked = _as_words(called, words, config_dirs)
    from runner.launchers.guest import being_guest  # with torch, which a wrong call does not wait for

    try:
        with being_guest(), importing_anew():
            if os.getcwd() not in sys.path and "" not in sys.path:
                sys.path.append(os.getcwd())  # as a command does
            yield asked
    except InputError as error:
        flag, instead = "a sweep needs -m", "a sweep needs runner.sweep"
        raise InputError(*(message.replace(flag, instead) for message in error.messages)) from None
    except SystemExit as error:  # a signal came while no run was there to save
        number = (error.code if isinstance(error.code, int) else 0) - 128
        if number not in list(signal.Signals):
            raise
        raise Preempted(signal.Signals(number).name) from None


def _as_words(called: str, words: Iterable[str], config_dirs: Folders) -> _Words:
    if isinstance(words, str):
        raise InputError(f"{called}({words!r}): the words are a list; type {called}({words.split()!r})")
    overrides = list(words)
    if other := [word for word in overrides if not isinstance(word, str)]:
        raise InputError(f"{called}: {other[0]!r} is no word; type KEY=VALUE, as 'optimizer.lr=0.1'")
    if flags := [word for word in overrides if word.startswith("-")]:
        raise InputError(f"{called}: {flags[0]} is a flag; -m is runner.sweep here, and --config-dir is config_dirs=")
    folders = [config_dirs] if isinstance(config_dirs, (str, Path)) else list(config_dirs)
    for folder in folders:
        if not Path(folder).is_dir():
            raise InputError(f"config_dirs: {folder} is not a folder; name the one with your model/*.yaml")
    return _Words(overrides, absolute(map(str, folders)))


def _in_a_shell(asked: _Words) -> str:
    words = ("python", *asked.command()[1:])
    return f"type it in a shell: {' '.join(words)}"
