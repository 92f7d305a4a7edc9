"""A sweep: it checks its jobs, creates or resumes its directory, and runs each job."""

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.config_loader import ConfigLoader
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, open_dict

from runner.config.custom_dirs import add_to_path
from runner.config.schema import Config
from runner.distributed.backend import as_backend
from runner.distributed.environment import RankInfo
from runner.errors import InputError, JobFailed, Preempted, print_messages
from runner.records.ledger import DONE, SweepRecord, lock_sweep, read_ledger, read_sweep, write_lines, write_state
from runner.records.result import read_result
from runner.records.run_directory import Request, new_directory
from runner.sweeps.jobs import (
    Composer,
    Job,
    check_shared,
    make_label,
    number_jobs,
    shared_values,
)
from runner.sweeps.pruner import TrialPruner
from runner.sweeps.queues import check_launchers, find_ended, submit

if TYPE_CHECKING:  # imports torch
    from runner.distributed.world import World


@dataclass
class Sweep:
    """The task function that Hydra's launchers call for each job, and may pickle.

    Attributes:
        directory: The directory of the sweep; None until a new one is created.
        arguments: The overrides of the sweep, with several values for some keys, but without those of Hydra.
        jobs: The jobs that are left, in the order in which they run, by Hydra's job.num.
        queued: The jobs for a queue, which are submitted together.
        all_queued: All jobs are for a queue.
        dry_run: They are only printed: nothing is written.
        is_new: This command has created the directory.
        pruners: The pruners of a study's jobs, by job number.
    """

    rank_info: RankInfo
    record: SweepRecord
    directory: str | None
    backend: dict[str, Any]
    arguments: list[str]
    jobs: list[Job] = field(default_factory=list)
    queued: list[tuple[Job, Config, Request]] = field(default_factory=list)
    all_queued: bool = False
    dry_run: bool = False
    is_new: bool = False
    pruners: dict[int, TrialPruner] = field(default_factory=dict)

    def open(
        self,
        jobs: list[list[str]],
        swept: list[str],
        master: DictConfig,
        loader: ConfigLoader,
        check: Callable[[list[Config]], None],
        adds_jobs: bool = False,
    ) -> None:
        """Compose and check every job, then create or resume the sweep's directory, and set `jobs`.

        Raises InputError, with nothing written, if a job has a value that is invalid by itself. Values that only do not
        fit together are a failure of that job. All ranks must call it.

        Args:
            jobs: The overrides of each job.
            swept: The keys that have several values.
            check: Checks further requirements on all configurations, and raises InputError.
            adds_jobs: The jobs are examples, and the sweeper adds its own with `add_job`.
        """
        composer = Composer(master, loader)
        configs = composer.compose_all(jobs)
        choices = [composer.choices[tuple(job)] for job in jobs]
        self.all_queued, self.dry_run = check_launchers(configs, choices, self.rank_info, adds_jobs)
        check(configs)
        if self.dry_run:
            if self.directory is not None:
                raise InputError(
                    f"launcher.dry_run=true: the jobs of resume={self.directory} have been printed to scripts there; "
                    "leave resume= out to print those of a new sweep"
                )
            self.directory = str(Path(configs[0].outputs).absolute() / configs[0].name / "sweep-STAMP")
            self.jobs = number_jobs(jobs, [], composer)
            return
        if self.rank_info.world_size > 1 and (messages := self.join().consensus.first_error("composed", [])):
            raise InputError(*messages)

        def plan() -> str:
            new_jobs = [] if adds_jobs else jobs
            if self.directory is None:
                self._create(new_jobs, swept, configs, composer)
            else:
                self._resume(new_jobs, jobs[0], swept, configs, composer)
            return json.dumps([self.directory, [asdict(job) for job in self.jobs]])

        self.directory, planned = json.loads(self.broadcast("sweep", plan))
        self.jobs = [Job(**job) for job in planned]
        with open_dict(master):  # Hydra's launchers create the directory of these two keys
            master.hydra.overrides.hydra += [f"hydra.sweep.dir='{self.directory}'", "hydra.sweep.subdir=."]
            master.hydra.sweep.dir = self.directory

    def join(self) -> "World":
        """Return the world of several ranks that run the sweep together."""
        from runner.distributed.rendezvous import join

        return join(self.rank_info, as_backend(self.backend))

    def broadcast(self, topic: str, make: Callable[[], str]) -> str:
        """Call `make` on rank 0 and return its result on all ranks. All ranks must call it.

        Raises InputError on all ranks if `make` does.
        """
        if self.rank_info.world_size == 1:
            return make()
        try:
            return self.join().consensus.broadcast(topic, make)
        except ValueError as error:
            raise InputError(*str(error).splitlines()) from None

    def __call__(self, cfg: DictConfig) -> dict[str, float]:
        """Run one job on this rank, or keep it for the submission to its queue. Return its metrics."""
        from runner.config.compose import checked
        from runner.launchers.launch import launch, make_launcher

        hydra = HydraConfig.get()
        position, overrides = int(hydra.job.num), list(hydra.overrides.task)
        job = self.jobs[position]
        add_to_path(self.record.config_dirs)  # the process of a launcher has not imported from them yet
        if self.rank_info.rank == 0 and not self.all_queued:
            print(f"\njob {position + 1} of {len(self.jobs)}: {job.label}", flush=True)
        request = self.request(job, overrides, dict(hydra.runtime.choices))
        try:
            config = checked(cfg, overrides)
            launcher = make_launcher(config)
            if launcher.queues:
                self.queued.append((job, config, request))
                return {}
            self.write_state(job, "running")
            metrics = launch(config, request, self.rank_info, launcher)
        except BaseException as error:
            if isinstance(error, InputError) and self.rank_info.rank == 0:
                print_messages(error.messages)
            state, text = _outcome_of(error)
            self.write_state(job, state, error=text)
            if isinstance(error, Preempted):
                raise SystemExit(143) from None  # unlike an Exception, it also ends Hydra's loop over the jobs
            raise
        self.write_outcome(job, metrics)
        return metrics

    def submit(self) -> bool:
        """Submit or print the jobs that are for a queue. Return True if they may still be in the queue."""
        directory = Path(str(self.directory))
        try:
            return submit(self.queued, directory, self.write_state)
        except InputError:
            if self.is_new and self.all_queued:
                shutil.rmtree(directory)
            raise

    def request(self, job: Job, overrides: list[str], choices: dict[str, str]) -> Request:
        """Return the request of a job. `overrides` are those with which it is composed."""
        return Request(
            overrides=tuple(overrides),
            config_dirs=tuple(self.record.config_dirs),
            command=tuple(self.record.command),
            directory=str(self.path(job)),
            choices=choices,
            pruner=self.pruners.get(job.number),
        )

    def path(self, job: Job) -> Path:
        assert self.directory is not None
        return Path(self.directory) / job.label

    def write_state(self, job: Job, state: str, **facts: Any) -> None:
        """Record the job's state in the ledger, on rank 0."""
        if self.rank_info.rank == 0:
            write_state(self.path(job).parent, job.number, state, **facts)

    def write_outcome(self, job: Job, metrics: dict[str, float]) -> str:
        """Record that a job has finished or was pruned, and return this state."""
        result = (read_result(self.path(job)) if self.rank_info.rank == 0 else None) or {"state": "finished"}
        state = result["state"] if result["state"] in DONE else "finished"
        self.write_state(job, state, metrics=metrics)
        return state

    def add_job(self, overrides: list[str], varying: list[str], **facts: Any) -> Job:
        """Add a job to the ledger of the open sweep, on rank 0, and return it."""
        assert self.directory is not None
        number = max((job.number for job in read_ledger(Path(self.directory))), default=-1) + 1
        job = Job(number, make_label(number, overrides, varying), overrides)
        write_lines(Path(self.directory), {**asdict(job), **facts})
        return job

    def _create(self, jobs: list[list[str]], swept: list[str], configs: list[Config], composer: Composer) -> None:
        self.record.shared = shared_values(configs, swept)
        path = new_directory(configs[0].outputs, configs[0].name, prefix="sweep-")
        self.is_new = True
        lock_sweep(path)
        self.jobs = number_jobs(jobs, [], composer)
        write_lines(path, {"sweep": asdict(self.record)}, *map(asdict, self.jobs))
        self.directory = str(path)

    def _resume(
        self, jobs: list[list[str]], example: list[str], swept: list[str], configs: list[Config], composer: Composer
    ) -> None:
        path = Path(str(self.directory))
        lock_sweep(path)
        recorded, before = read_ledger(path), read_sweep(path)
        check_shared(path, recorded, before.shared, example, swept, composer)
        shared = shared_values(configs, swept)
        self.record.shared = {key: value for key, value in before.shared.items() if key in shared}
        for job in recorded:
            if job.state in DONE and job.end is None:  # the sweep was killed before it recorded the outcome
                write_state(path, job.number, job.state, metrics=job.metrics)
        added = number_jobs(jobs, recorded, composer)
        if (self.record.typed, self.record.shared) != (before.typed, before.shared):
            write_lines(path, {"sweep": asdict(self.record)})
        write_lines(path, *map(asdict, added))
        left = [job for job in recorded if job.state not in DONE]
        ended = find_ended(left)
        queued = [job for job in left if job.queued_as and job.queued_as not in ended]
        unfinished = [Job(job.number, job.label, job.overrides) for job in left if job not in queued]
        self.jobs = [*unfinished, *added]
        done = f"{len(recorded) - len(left)} jobs are done" + (f", {len(queued)} in the queue" if queued else "")
        print(f"resuming {path}: {done}, {len(unfinished)} unfinished, {len(added)} new", flush=True)


def _outcome_of(error: BaseException) -> tuple[str, str]:
    """Return the state and the error of a job that has raised this."""
    if isinstance(error, InputError):
        return "refused", "\n".join(error.messages)
    if isinstance(error, (Preempted, KeyboardInterrupt)):
        return "preempted", str(error) or "interrupted"
    return "failed", str(error) if isinstance(error, JobFailed) else f"{type(error).__name__}: {error}"
