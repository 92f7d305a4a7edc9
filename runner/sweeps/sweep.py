"""A sweep: its jobs checked, its directory, each job's run."""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from hydra.core.config_loader import ConfigLoader
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, open_dict

from runner.config.own_folders import add_to_path
from runner.config.renamed_targets import rename_keys, rename_shared
from runner.config.schema import Config
from runner.distributed.backend import as_backend
from runner.distributed.environment import RankInfo
from runner.errors import InputError, tell
from runner.launchers.slurm.queue import ended
from runner.runs.code_state import CodeState
from runner.runs.frozen_code import take_state
from runner.runs.ledger import DONE, SweepRecord, hold, read_ledger, read_sweep, write_lines, write_state
from runner.runs.run_directory import Request, new_directory, read_result
from runner.sweeps.plan import (
    Composer,
    Job,
    check_shared,
    composed_words,
    make_label,
    number_jobs,
    shared_values,
)
from runner.sweeps.pruner import TrialPruner
from runner.sweeps.submission import check_launchers, submit

_current: list["Sweep"] = []


@dataclass
class Sweep:
    """The task that Hydra's launchers run for each job; they may pickle it."""

    rank_info: RankInfo
    record: SweepRecord
    directory: str | None  # of the sweep that is resumed; None until a new one is made
    backend: dict[str, Any]
    arguments: list[str]  # what is typed for the jobs, keys with several values among it
    jobs: list[Job] = field(default_factory=list)  # in the order in which they are to run, by Hydra's job.num
    queued: list[tuple[Job, Config, Request]] = field(default_factory=list)  # for a queue, once all are known
    queues: bool = False  # all jobs are for a queue
    shows: bool = False  # and are only shown: nothing is written
    is_new: bool = False  # this command has made the directory
    code: CodeState | None = None  # as the jobs were checked, which processes that start later import as it is then
    process: int = field(default_factory=os.getpid)  # of the command, whose own jobs run what it has imported
    pruners: dict[int, TrialPruner] = field(default_factory=dict)  # by job number, where a study asks for the jobs

    def open(
        self,
        jobs: list[list[str]],
        swept: list[str],
        master: DictConfig,
        loader: ConfigLoader,
        check: Callable[[list[Config]], None],
        asks: bool = False,
    ) -> None:
        """Compose and check every job, then make the sweep's directory, or resume the one there is.

        What is left to run is then in `jobs`. Raises InputError, with nothing written, when a job has a value that is
        wrong by itself; values that only do not fit together are that job's own failure. check: what else must hold;
        it raises InputError. asks: the jobs given are examples, and the sweeper adds its own. All ranks must call it.
        """
        composer = Composer(master, loader)
        configs = composer.compose_all(jobs)
        check(configs)
        choices = [composer.choices[tuple(job)] for job in jobs]
        self.queues, self.shows = check_launchers(configs, choices, self.rank_info, asks)
        if self.shows:
            return self._show(jobs, configs[0], composer)
        if not self.queues and self.rank_info.may_start_processes:
            self.code = take_state(self.record.config_dirs)
        if self.rank_info.world_size > 1:
            from runner.distributed.rendezvous import join

            if messages := join(self.rank_info, as_backend(self.backend)).agreement.first_error("composed", []):
                raise InputError(*messages)

        def plan() -> str:
            assert self.rank_info.rank == 0  # the others would read what this one writes
            if self.directory is None:
                self._begin(jobs, swept, configs, composer, asks)
            else:
                self._resume(jobs, swept, configs, composer, asks)
            return json.dumps([self.directory, [asdict(job) for job in self.jobs]])

        self.directory, planned = json.loads(self.share("sweep", plan))
        self.jobs = [Job(**job) for job in planned]
        with open_dict(master):  # the launcher makes these two, and nothing else, in its name
            master.hydra.overrides.hydra += [f"hydra.sweep.dir='{self.directory}'", "hydra.sweep.subdir=."]
            master.hydra.sweep.dir = self.directory

    def share(self, topic: str, make: Callable[[], str]) -> str:
        """What `make` returned on rank 0. Raises InputError everywhere when it was refused. All ranks must call it."""
        if self.rank_info.world_size == 1:
            return make()
        from runner.distributed.rendezvous import join

        try:
            return join(self.rank_info, as_backend(self.backend)).agreement.share(topic, make)
        except ValueError as error:
            raise InputError(*str(error).splitlines()) from None

    def __call__(self, cfg: DictConfig) -> dict[str, float]:
        """Run one job on this rank. Returns its metrics."""
        from runner.config.compose import checked
        from runner.errors import JobFailed, Preempted
        from runner.launchers.launch import launch, make_launcher

        owner = HydraConfig.get()
        position, typed = int(owner.job.num), list(owner.overrides.task)
        job = self.jobs[position]
        add_to_path(self.record.config_dirs)  # a launcher's own process has them not yet
        if self.rank_info.rank == 0 and not self.queues:
            print(f"\njob {position + 1} of {len(self.jobs)}: {job.label}", flush=True)
        request = self.request(job, typed, dict(owner.runtime.choices))
        try:
            config = checked(cfg, typed)
            launcher = make_launcher(config)
            if launcher.queues:
                self.queued.append((job, config, request))
                return {}
            if self.process == os.getpid() and not launcher.starts_processes:
                request = replace(request, submitted=None)
            self.tell(job, "running")
            metrics = launch(config, request, self.rank_info, launcher)
        except InputError as error:
            if self.rank_info.rank == 0:
                tell(error.messages)
            self.tell(job, "refused", error="\n".join(error.messages))
            raise
        except Preempted as error:
            self.tell(job, "preempted", error=str(error))
            raise SystemExit(143) from None  # unlike an Exception it ends the sweep, and not the job alone
        except JobFailed as error:
            self.tell(job, "failed", error=str(error))
            raise
        except KeyboardInterrupt:
            self.tell(job, "preempted", error="interrupted")
            raise
        except BaseException as error:
            self.tell(job, "failed", error=f"{type(error).__name__}: {error}")
            raise
        self.tell_result(job, metrics)
        return metrics

    def submit(self) -> bool:
        """Submit the jobs that are for a queue, or show them. Returns whether they are still there."""
        directory = Path(str(self.directory))
        try:
            return submit(self.queued, directory, self.tell)
        except InputError:
            if self.is_new and self.queues:
                shutil.rmtree(directory)
            raise

    def request(self, job: Job, typed: list[str], choices: dict[str, str]) -> Request:
        """How a job is asked for. typed: the words that are composed for it."""
        return Request(
            overrides=tuple(typed),
            config_dirs=tuple(self.record.config_dirs),
            command=tuple(self.record.command),
            directory=str(self.path(job)),
            choices=choices,
            pruner=self.pruners.get(job.number),
            submitted=self.code,
        )

    def words(self) -> list[list[str]]:
        """What is composed for each job that is left."""
        return [composed_words(job.overrides) for job in self.jobs]

    def path(self, job: Job) -> Path:
        assert self.directory is not None
        return Path(self.directory) / job.label

    def tell(self, job: Job, state: str, **facts: Any) -> None:
        """Write in the ledger what a job has come to; rank 0 does."""
        if self.rank_info.rank == 0:
            write_state(self.path(job).parent, job.number, state, **facts)

    def tell_result(self, job: Job, metrics: dict[str, float]) -> str:
        """Write in the ledger that a job has ended well, or was pruned. Returns which."""
        result = (read_result(self.path(job)) if self.rank_info.rank == 0 else None) or {"state": "finished"}
        state = result["state"] if result["state"] in DONE else "finished"
        self.tell(job, state, metrics=metrics)
        return state

    def add(self, overrides: list[str], varying: list[str], **facts: Any) -> Job:
        """A job that was not known when the sweep was opened; rank 0 calls it."""
        assert self.directory is not None
        number = max((job.number for job in read_ledger(Path(self.directory))), default=-1) + 1
        job = Job(number, make_label(number, overrides, varying), overrides)
        write_lines(Path(self.directory), {**asdict(job), **facts})
        return job

    def _show(self, jobs: list[list[str]], config: Config, composer: Composer) -> None:
        if self.directory is not None:
            raise InputError(
                f"launcher.dry_run=true: resume={self.directory} submits jobs, whose scripts are in slurm/ there; "
                "show a new sweep, without resume="
            )
        self.directory = str(Path(config.outputs).absolute() / config.name / "sweep-STAMP")
        self.jobs = number_jobs(jobs, [], composer)

    def _begin(
        self, jobs: list[list[str]], swept: list[str], configs: list[Config], composer: Composer, asks: bool
    ) -> None:
        self.record.shared = shared_values(configs, swept)
        path = new_directory(configs[0].outputs, configs[0].name, prefix="sweep-")
        self.is_new = True
        hold(path)
        self.jobs = [] if asks else number_jobs(jobs, [], composer)
        write_lines(path, {"sweep": asdict(self.record)}, *map(asdict, self.jobs))
        self.directory = str(path)

    def _resume(
        self, jobs: list[list[str]], swept: list[str], configs: list[Config], composer: Composer, asks: bool
    ) -> None:
        path = Path(str(self.directory))
        hold(path)
        recorded, before = read_ledger(path), read_sweep(path)
        recorded = [replace(job, overrides=rename_keys(job.overrides)) for job in recorded]
        check_shared(path, recorded, before.shared, jobs[0], swept, composer)
        still = shared_values(configs, swept)
        self.record.shared = {key: value for key, value in rename_shared(before.shared).items() if key in still}
        for job in recorded:
            if job.state in DONE and job.end is None:  # a kill came before the ledger's line
                write_state(path, job.number, job.state, metrics=job.metrics)
        added = [] if asks else number_jobs(jobs, recorded, composer)
        if (self.record.typed, self.record.shared) != (before.typed, before.shared):
            write_lines(path, {"sweep": asdict(self.record)})
        write_lines(path, *map(asdict, added))
        left = [job for job in recorded if job.state not in DONE]
        over = ended([job.queued_as for job in left if job.queued_as])
        queued = [job for job in left if job.queued_as and job.queued_as not in over]
        unfinished = [Job(job.number, job.label, job.overrides) for job in left if job not in queued]
        self.jobs = [*unfinished, *added]
        done = f"{len(recorded) - len(left)} jobs are done" + (f", {len(queued)} in the queue" if queued else "")
        print(f"resuming {path}: {done}, {len(unfinished)} unfinished, {len(added)} new", flush=True)


def current() -> Sweep:
    """The sweep that this process runs; Hydra hands its task to the launcher alone, and the sweeper needs it too."""
    return _current[-1]


@contextmanager
def being_current(sweep: Sweep) -> Iterator[None]:
    """Meanwhile it is the one that `current` returns."""
    _current.append(sweep)
    try:
        yield
    finally:
        _current.pop()
