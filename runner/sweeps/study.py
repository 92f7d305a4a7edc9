"""A sweep whose jobs are the trials of an Optuna study. Only rank 0 imports Optuna; all ranks run its trials."""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
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
from runner.records.ledger import FAILED, REMOVED, JobRecord, is_sweep, job_of, read_ledger
from runner.records.run_record import DONE
from runner.sweeps.jobs import Composer, complete_overrides, first_value
from runner.sweeps.study_options import StudyOptions, TrialPruner, check_study, distribution, open_storage
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

    def open(self, directory: Path) -> None:
        """Open or create the study of the sweep in this directory. Raises InputError if the options do not match it."""
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        options = self.options
        direction: Any = options.direction
        options.storage = options.storage or str(directory / JOURNAL)
        for name in ("sampler", "pruner"):
            try:
                create(OmegaConf.to_container(getattr(options, name)))
            except Exception as error:  # of any type, raised by the constructor
                raise InputError(f"hydra.sweeper.{name}: {first_line(error)}") from None
        try:
            self.study = optuna.create_study(
                storage=open_storage(options.storage),
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
        # A resumed study needs another seed: with the same one, the sampler would propose the first trials again.
        sampler: Any = OmegaConf.to_container(options.sampler)
        if (seed := sampler.get("seed")) is not None:
            sampler["seed"] = seed + num_trials
        self.study.sampler = create(sampler)

    def next_trials(self) -> list[JobWithPruner]:
        """Return the trials that were interrupted, or else at most `n_jobs` new ones; none after `n_trials`.

        A trial that was stopped by itself is interrupted, but this sweep does not run it again. The study keeps the
        value of a job whose directory was removed.
        """
        self.report_outcomes()
        if self.sweep.find_failed():
            return []
        jobs, known = read_ledger(Path(str(self.sweep.directory))), self.study.get_trials(deepcopy=False)
        tried = {job.number for job in self.sweep.jobs}
        interrupted = [
            job
            for job in jobs
            if job.trial is not None and job.number not in tried and job.state not in (*DONE, *FAILED)
            if job.state != REMOVED or not known[job.trial].state.is_finished()
        ]
        if interrupted:
            return [self._with_pruner(job) for job in interrupted]
        trials = []
        for _ in range(min(self.options.n_jobs, self.options.n_trials - len(jobs))):
            trial = self.study.ask({key: distribution(override) for key, override in self.swept.items()})
            overrides = [*self.fixed, *(f"{key}={value}" for key, value in trial.params.items())]
            job = self.sweep.add_job(overrides, list(self.swept), trial=trial.number)
            trials.append(self._with_pruner(job))
        return trials

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
            if job.trial is None or trials[job.trial].state.is_finished() or job.state not in (*DONE, *FAILED):
                continue
            value = job.metrics.get(metric, math.nan)
            if job.state == "finished" and math.isfinite(value):
                self.study.tell(job.trial, value)
            else:
                self.study.tell(job.trial, state=TrialState.PRUNED if job.state == "pruned" else TrialState.FAIL)

    def _with_pruner(self, job: JobRecord) -> JobWithPruner:
        pruner: Any = OmegaConf.to_container(self.options.pruner)
        assert job.trial is not None and self.options.storage is not None
        return job, TrialPruner(self.options.storage, self.study.study_name, job.trial, self.options.metric, pruner)


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
