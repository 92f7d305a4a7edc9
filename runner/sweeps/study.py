"""A sweep whose jobs are the trials of an Optuna study. Only rank 0 imports Optuna; all ranks run its trials."""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from hydra.plugins.launcher import Launcher
from omegaconf import OmegaConf

from runner.config.instantiate import create
from runner.config.schema import Config
from runner.config.texts import keep_text
from runner.errors import InputError, first_line
from runner.records.ledger import FAILED, REMOVED, JobRecord, is_sweep, job_of, promotion, read_ledger, write_lines
from runner.records.run_record import DONE, PAUSED
from runner.sweeps.jobs import Composer, complete_overrides, first_value, new_job
from runner.sweeps.rungs import Rungs
from runner.sweeps.study_options import (
    PausedAsPruned,
    StudyOptions,
    TrialPruner,
    check_study,
    distribution,
    open_storage,
)
from runner.sweeps.sweep import Sweep

JOURNAL = "study.journal"

JobWithPruner = tuple[JobRecord, TrialPruner]


@dataclass
class Study:
    """Optuna's study, which rank 0 opens, and the sweep that runs its trials."""

    sweep: Sweep
    options: StudyOptions
    fixed: list[str]  # the overrides that all jobs share
    swept: dict[str, Override]  # by key
    study: Any = None
    proposing: Any = None  # the study as the sampler reads it
    rungs: Rungs | None = None  # with hydra/sweeper/pruner=asha
    first_trial: int = 0  # of this sweep; earlier trials are those of other sweeps

    def open(self, directory: Path) -> None:
        """Open or create the study of the sweep in this directory. Raises InputError if the options do not match it."""
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        options = self.options
        direction: Any = options.direction
        is_shared = options.storage is not None  # possibly with other sweeps
        options.storage = options.storage or str(directory / JOURNAL)
        try:
            storage = open_storage(options.storage)
            self.study = optuna.create_study(
                storage=storage,
                study_name=options.study_name or directory.name,
                direction=direction,
                load_if_exists=True,
            )
        except Exception as error:  # each database has its own exception classes
            raise InputError(f"hydra.sweeper.storage={options.storage}: {first_line(error)}") from None
        name, known = self.study.study_name, self.study.direction.name.lower()
        if known != direction:
            raise InputError(
                f"hydra.sweeper.direction={direction}: the direction of study {name} is {known}; keep it, or set "
                "another study_name"
            )
        num_trials = len(self.study.get_trials(deepcopy=False))
        recorded = read_ledger(directory) if is_sweep(directory) else []
        if any(job.trial is not None and job.trial >= num_trials for job in recorded):
            raise InputError(
                f"hydra.sweeper.storage={options.storage}: the study {name} lacks trials of {directory}; keep the "
                "storage and the study_name with which the sweep was started"
            )
        self.study.sampler, self.proposing = create(OmegaConf.to_container(options.sampler)), self.study
        if is_shared:
            self.first_trial = next((job.trial for job in recorded if job.trial is not None), num_trials)
        pruner = create(OmegaConf.to_container(options.pruner))
        if isinstance(pruner, Rungs):
            self.rungs = pruner
            view: Any = PausedAsPruned(storage)
            self.proposing = optuna.load_study(study_name=name, storage=view)

    def next_trials(self) -> list[JobWithPruner]:
        """Return the trials that were interrupted, or else at most `n_jobs` promoted and new ones, `n_trials` in all.

        A trial that was stopped by itself is interrupted, but this sweep does not run it again.
        """
        self.report_outcomes()
        if self.sweep.find_failed():
            return []
        path = Path(str(self.sweep.directory))
        jobs, known = read_ledger(path), self.study.get_trials(deepcopy=False)
        tried = {job.number for job in self.sweep.jobs}
        interrupted = [
            job
            for job in jobs
            if job.trial is not None and job.number not in tried and job.state not in (*DONE, *FAILED)
            if job.state != REMOVED or not self._knows_outcome(job, known[job.trial])
        ]
        if interrupted:
            return [self._with_pruner(job) for job in interrupted]
        n_jobs, number = self.options.n_jobs, max((job.number for job in jobs), default=-1) + 1
        promoted = self._promote(jobs, known)[:n_jobs]
        num_new = max(0, min(n_jobs - len(promoted), self.options.n_trials - len(jobs)))
        added = [self._propose(number + index, path) for index in range(num_new)]
        # In one write, so that a sweep that was killed here resumes with all of them or decides again.
        write_lines(path, *(promotion(job.number, job.rung) for job in promoted), *(job.line() for job in added))
        return [self._with_pruner(job) for job in (*promoted, *added)]

    def _knows_outcome(self, job: JobRecord, trial: Any) -> bool:
        """Return True if the study has the value with which the trial has ended, or has paused at its rung."""
        has_paused = self.rungs and max(trial.intermediate_values, default=0) >= self.rungs.step_of(job.rung)
        return bool(trial.state.is_finished() or has_paused)

    def _promote(self, jobs: Sequence[JobRecord], known: Sequence[Any]) -> list[JobRecord]:
        """Return the paused jobs that continue, each with its next rung."""
        if self.rungs is None:
            return []
        values = {job.number: known[job.trial].intermediate_values for job in jobs if job.trial is not None}
        paused = {job.number: job for job in jobs if job.state == PAUSED}
        rungs = {number: job.rung for number, job in paused.items()}
        chosen = self.rungs.choose(values, rungs, maximizes=self.options.direction == "maximize")
        return [replace(paused[number], rung=rung) for number, rung in chosen]

    def _propose(self, number: int, directory: Path) -> JobRecord:
        """Return a job with a new trial of the study.

        Each trial has its own seed, so that the sampler of a resumed sweep proposes the same trials as that of one that
        was not interrupted. Samplers whose seed determines a fixed sequence of points keep it.
        """
        from optuna.samplers import GridSampler, QMCSampler

        sampler: Any = OmegaConf.to_container(self.options.sampler)
        if sampler.get("seed") is not None and not isinstance(self.study.sampler, (GridSampler, QMCSampler)):
            self.study.sampler = create(sampler | {"seed": sampler["seed"] + self.first_trial + number})
        self.proposing.sampler = self.study.sampler
        trial = self.proposing.ask({key: distribution(override) for key, override in self.swept.items()})
        overrides = [*self.fixed, *(f"{key}={value}" for key, value in trial.params.items())]
        return replace(new_job(number, overrides, list(self.swept), directory), trial=trial.number)

    def report_outcomes(self) -> None:
        """Report the outcomes of all ended trials to the study. Raises InputError if no finished job has the metric."""
        from optuna.trial import TrialState

        trials, metric = self.study.get_trials(deepcopy=False), self.options.metric
        jobs = read_ledger(Path(str(self.sweep.directory)))
        finished = [job for job in jobs if job.state == "finished"]
        if finished and not any(metric in job.metrics for job in finished):
            raise InputError(
                f"hydra.sweeper.metric={metric}: {finished[0].label} has finished without this metric; set one that it "
                f"has: {', '.join(sorted(finished[0].metrics))}"
            )
        for job in jobs:
            has_ended = job.state in (*DONE, *FAILED) and job.state != PAUSED
            if job.trial is None or trials[job.trial].state.is_finished() or not has_ended:
                continue
            value = job.metrics.get(metric, math.nan)
            if job.state == "finished" and math.isfinite(value):
                self.study.tell(job.trial, value)
            else:
                self.study.tell(job.trial, state=TrialState.PRUNED if job.state == "pruned" else TrialState.FAIL)

    def _with_pruner(self, job: JobRecord) -> JobWithPruner:
        pruner: Any = OmegaConf.to_container(self.options.pruner)
        assert job.trial is not None and self.options.storage is not None
        pause_at = self.rungs.step_of(job.rung) if self.rungs else None
        return job, TrialPruner(
            self.options.storage, self.study.study_name, job.trial, self.options.metric, pruner, pause_at
        )


def run_study(
    sweep: Sweep,
    options: StudyOptions,
    composer: Composer,
    launcher: Launcher,
    check: Callable[[Sequence[Config]], None],
) -> None:
    """Run the trials. All ranks must call it. Raises InputError, with nothing written, for invalid options.

    check: the check of the jobs by Hydra's launcher, which raises InputError.
    """
    texts = [*(keep_text(f"{key}={value}") for key, value in options.params.items()), *sweep.arguments]
    try:
        parsed = OverridesParser.create(composer.loader).parse_overrides(texts)
    except HydraException as error:
        raise InputError(f"hydra.sweeper.params: {str(error).splitlines()[0]}") from None
    overrides = {override.get_key_element(): override for override in parsed}
    swept = {key: override for key, override in overrides.items() if override.is_sweep_override()}
    fixed = [f"{key}={o.get_value_element_as_str()}" for key, o in overrides.items() if key not in swept]
    example = [*fixed, *(f"{key}={first_value(override)}" for key, override in swept.items())]
    study = Study(sweep, options, fixed, swept)

    def check_all(configs: Sequence[Config]) -> None:
        if sweep.rank_info.rank == 0:
            check_study(options, swept, configs[0])
        check(configs)

    sweep.open([example], list(swept), composer, check_all, prepare=study.open)
    sweep.jobs = []
    for number in itertools.count():
        trials = sweep.broadcast(
            f"trials{number}", lambda: [(job.line(), asdict(pruner)) for job, pruner in study.next_trials()]
        )
        if not trials:
            return
        first = len(sweep.jobs)
        for line, pruner in trials:
            sweep.jobs.append(job_of(line, Path(str(sweep.directory))))
            sweep.pruners[sweep.jobs[-1].number] = TrialPruner(**pruner)
        launcher.launch([complete_overrides(job.overrides) for job in sweep.jobs[first:]], initial_job_idx=first)
