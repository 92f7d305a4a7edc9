"""A sweep: the checks of its jobs, its new or resumed directory, and the execution of each job."""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, read_write

from runner.config.custom_dirs import add_to_path
from runner.config.diagnostics.keys import key_of
from runner.config.diagnostics.type_hints import show
from runner.config.pointers import pointer_to
from runner.config.recorded_code import importing_code_of
from runner.config.request import Request
from runner.config.resume import OVER, STOP_ON_FAILURE, Arguments
from runner.config.schema import Config
from runner.distributed.backend import as_backend
from runner.distributed.environment import RankInfo
from runner.distributed.failures.signals import forget_signal, received
from runner.errors import InputError, JobFailed, Preempted, as_input_error, did_you_mean, print_messages
from runner.jobs.mirrored_directory import begin_mirror
from runner.records import ledger
from runner.records.ledger import JobRecord, SweepRecord, is_stop_requested, job_of, read_ledger
from runner.records.run_directory import Command, Destination, create_directory, new_directory
from runner.records.run_record import DONE, find_run
from runner.remote.address import is_remote
from runner.sweeps.jobs import Composer, check_shared, number_jobs, shared_values
from runner.sweeps.queues import check_launchers, find_unfinished
from runner.sweeps.study_options import TrialPruner

if TYPE_CHECKING:  # imports torch
    from runner.distributed.world import World


@dataclass
class Sweep:
    """The task function that Hydra's launchers call for each job. Some of them pickle it.

    Attributes:
        given: The arguments of the command.
        directory: The directory of the sweep; None until a new one is created.
        named: The directory that `run_id` names, which need not exist.
        arguments: The overrides of the sweep, with several values for some keys, but without those of Hydra.
        over: The keys over which the table at the end averages.
        stops_on_failure: True if no further jobs start once one has failed or was refused.
        on_composed: Called once all jobs are composed and checked.
        jobs: The remaining jobs, in the order in which they run; Hydra's job.num is an index of this list.
        queues: True if the jobs are for a queue; `queued` are submitted together, or only printed if `dry_run`.
        is_new: True if the directory has no ledger yet.
        is_created: True if this process has created the directory.
        pruners: The pruners of a study's jobs, by job number.
    """

    rank_info: RankInfo
    given: Arguments
    record: SweepRecord
    directory: str | None
    named: Path | None
    backend: dict[str, Any]
    arguments: list[str]
    over: list[str] = field(default_factory=lambda: ["seed"])
    stops_on_failure: bool = False
    on_composed: Callable[[], object] = int
    jobs: list[JobRecord] = field(default_factory=list)
    queues: bool = False
    queued: list[tuple[JobRecord, Request]] = field(default_factory=list)
    dry_run: bool = False
    is_new: bool = False
    is_created: bool = False
    pruners: dict[int, TrialPruner] = field(default_factory=dict)

    def open(
        self,
        jobs: list[list[str]],
        swept: list[str],
        composer: Composer,
        check: Callable[[list[Config]], None],
        prepare: Callable[[Path], None] | None = None,
    ) -> None:
        """Compose and check every job, then create or resume the sweep's directory, and set `jobs`.

        Raises InputError, with nothing written, if a job has a value that is invalid by itself. A job whose values do
        not fit together is refused when it starts. All ranks must call it.

        `swept` are the keys that have several values. `check` and `prepare` may raise InputError. `prepare` is called
        with the directory on rank 0, before anything is written there; the jobs are then examples, and the sweeper
        adds its own to the ledger.
        """
        for job in jobs:  # an unknown key or option is refused before torch is imported for the values
            composer.load(job)
        if unknown := [key for key in self.over if key not in (*swept, "seed")]:
            hint = did_you_mean(unknown[0], swept)
            raise InputError(f"{OVER}={show(self.over)}: the jobs do not differ in {unknown[0]}{hint}")
        composed = [composer.compose(job) for job in jobs]
        self.on_composed()
        configs = [config for config, _ in composed]
        self.queues, self.dry_run = check_launchers(composed, self.rank_info, prepare is not None)
        check(configs)
        if self.queues and self.stops_on_failure:
            raise InputError(f"{STOP_ON_FAILURE}=true: a queue receives all jobs together; leave it out")
        if self.dry_run:
            if self.directory is not None:
                raise InputError("launcher.dry_run=true: leave resume= out to print the jobs of a new sweep")
            self.directory = str(self.named or Path(configs[0].outputs).absolute() / configs[0].name / "sweep-STAMP")
            self.jobs = number_jobs(jobs, [], composer, Path(self.directory))
            return
        if self.rank_info.world_size > 1 and (messages := self.join().consensus.first_error("composed", [])):
            raise InputError(*messages)

        def plan() -> tuple[str, list[dict[str, Any]]]:
            path = self._open_directory(configs[0])
            ledger.lock_sweep(path)
            begin_mirror(path, configs[0])
            self.is_new = not ledger.is_sweep(path)
            recorded = [] if self.is_new else [self._located(job, configs[0]) for job in read_ledger(path)]
            self._share(path, recorded, configs, swept)
            if prepare is not None:
                prepare(path)
            added = number_jobs([] if prepare else jobs, recorded, composer, path)
            self.jobs = [*find_unfinished(path, recorded, len(added)), *added]
            header = {"sweep": asdict(self.record), "at": round(time.time(), 3)}
            ledger.write_lines(path, header, *(job.line() for job in added))
            return str(path), [job.line() for job in self.jobs]

        self.directory, planned = self.broadcast("sweep", plan)
        self.jobs = [job_of(line, Path(str(self.directory))) for line in planned]
        hydra = composer.master.hydra
        with read_write(hydra):  # Hydra's launchers create the directory that these two keys name
            hydra.overrides.hydra += [pointer_to(Path(str(self.directory)), "hydra.sweep.dir"), "hydra.sweep.subdir=."]
            hydra.sweep.dir = self.directory

    def _open_directory(self, config: Config) -> Path:
        """Set `directory`, which is created for a new sweep, and return its path."""
        if self.directory is None and self.named:
            self.is_created = create_directory(self.named)
            self.directory = str(self.named)
        elif self.directory is None:
            self.is_created = True
            self.directory = str(new_directory(config.local_outputs, config.name, prefix="sweep-"))
        return Path(self.directory)

    def _located(self, job: JobRecord, config: Config) -> JobRecord:
        """Return the recorded job with the local directory and the options of the store of this command."""
        if not is_remote(config.outputs):
            return job
        own = [override for override in self.arguments if _is_location(override)]
        return replace(job, overrides=[*(each for each in job.overrides if not _is_location(each)), *own])

    def _share(self, path: Path, recorded: list[JobRecord], configs: list[Config], swept: list[str]) -> None:
        """Record the values that all jobs share. Raise InputError if a resumed sweep cannot continue with them."""
        self.record.shared = shared_values(configs, swept)
        if not self.is_new:
            before = ledger.read_sweep(path).shared
            check_shared(path, recorded, before, configs[0], swept)
            if not self.given.resume_force:
                _check_code(recorded, configs[0].launcher)
            self.record.shared = {key: value for key, value in before.items() if key in self.record.shared}

    def join(self) -> "World":
        """Join the world of the ranks that run the sweep together, and return it."""
        from runner.distributed.rendezvous import join

        return join(self.rank_info, as_backend(self.backend))

    def broadcast(self, topic: str, make: Callable[[], Any]) -> Any:
        """Return what `make` returns on rank 0, a value for JSON, on all ranks, or raise its InputError on all.

        All ranks must call it.
        """
        if self.rank_info.world_size == 1:
            return make()
        with as_input_error():
            return self.join().consensus.broadcast(topic, make)

    def __call__(self, cfg: DictConfig) -> dict[str, float]:
        """Run one job on this rank, or keep it for the submission to its queue. Return its metrics."""
        from runner.config.compose import checked
        from runner.launchers.launch import launch, make_launcher

        hydra = HydraConfig.get()
        position, overrides = int(hydra.job.num), list(hydra.overrides.task)
        job = self.jobs[position]
        add_to_path(self.record.config_dirs)  # a process of Hydra's launcher has not added them yet
        if self.rank_info.rank == 0 and not self.queues:
            print(f"\njob {position + 1} of {len(self.jobs)}: {job.label}", flush=True)
        try:
            request = self.request(job, checked(cfg, overrides), overrides, dict(hydra.runtime.choices))
            launcher = make_launcher(request.config.launcher, request.config.debug)
            if launcher.queues:
                self.queued.append((job, request))
                return {}
            if self.skips(job):
                return {}
            self.write_state(job, "running")
            with importing_code_of(self.given.code_of):  # another process may have composed the jobs
                metrics = launch(request, self.rank_info, launcher)
        except BaseException as error:
            if isinstance(error, InputError) and self.rank_info.rank == 0:
                print_messages(error.messages)
            state, text = _outcome_of(error)
            self.write_state(job, state, error=text)
            if self._continues(job, isinstance(error, Preempted)):
                return {}
            if isinstance(error, Preempted):
                raise SystemExit(143) from None  # unlike an Exception, it also ends Hydra's loop over the jobs
            raise
        self.write_outcome(job, metrics)
        self._continues(job)
        return metrics

    def _continues(self, job: JobRecord, is_stopped: bool = False) -> bool:
        """Return True if `runs stop` has stopped only this job, which may have ended before it received the signal."""
        if not (is_stopped or received()) or not is_stop_requested(job.directory.parent, job.number):
            return False
        forget_signal()
        return True

    def skips(self, job: JobRecord) -> bool:
        """Return True if the job must not start: `runs stop` has stopped it, or another one has failed.

        All ranks must call it.
        """
        stopped = "stopped before it started"

        def find_reason() -> str:
            if is_stop_requested(job.directory.parent, job.number):
                return stopped
            failed = self.find_failed()
            return f"not started, because {failed} has failed" if failed else ""

        reason = self.broadcast(f"skip{job.number}", find_reason)
        if reason == stopped:
            self.write_state(job, "preempted", error=reason)
        if reason and self.rank_info.rank == 0:
            print(f"{job.label} was {reason}", flush=True)
        return bool(reason)

    def find_failed(self) -> str:
        """Return the label of a job whose failure stops the sweep; empty if there is none."""
        if not self.stops_on_failure:
            return ""
        jobs = read_ledger(Path(str(self.directory)))
        return next((job.label for job in jobs if job.state in ledger.FAILED and not job.is_due), "")

    def request(self, job: JobRecord, config: Config, overrides: list[str], choices: dict[str, str]) -> Request:
        """Return the request of a job. `overrides` are those with which it is composed."""
        return Request(
            config,
            Command(tuple(overrides), tuple(self.record.config_dirs), tuple(self.record.command), choices),
            Destination(str(job.directory)),
            pruner=self.pruners.get(job.number),
            code_of=self.given.code_of,
        )

    def write_state(self, job: JobRecord, state: str, **facts: Any) -> None:
        """Record the job's state in the ledger, on rank 0."""
        if self.rank_info.rank == 0:
            ledger.write_state(job.directory.parent, job.number, state, **facts)

    def write_outcome(self, job: JobRecord, metrics: dict[str, float]) -> str:
        """Record that a job has finished, was pruned or has paused, and return this state."""
        if self.rank_info.rank != 0:
            return "finished"
        run = find_run(job.directory)
        if not run.is_recorded:  # a task such as compare writes to another directory
            run.state, run.metrics = "finished", metrics
            job.directory.mkdir(exist_ok=True)
            run.save()
        state = run.state if run.state in DONE else "finished"
        self.write_state(job, state, metrics=metrics)
        return state


def _check_code(recorded: list[JobRecord], launcher: dict[str, Any]) -> None:
    """Raise InputError if the code of jobs that have started has changed, because reports compare the jobs."""
    from runner.config.changes import check_code

    codes = {str(find_run(job.directory).code): job for job in recorded if job.num_starts}
    for job in codes.values():
        if messages := check_code(job.directory, launcher):
            raise InputError(*messages)


def _is_location(override: str) -> bool:
    return key_of(override).partition(".")[0] in ("outputs", "remote")


def _outcome_of(error: BaseException) -> tuple[str, str]:
    """Return the state and the error of a job that has raised this."""
    if isinstance(error, InputError):
        return "refused", "\n".join(error.messages)
    if isinstance(error, (Preempted, KeyboardInterrupt)):
        return "preempted", str(error) or "interrupted"
    return "failed", str(error) if isinstance(error, JobFailed) else f"{type(error).__name__}: {error}"
