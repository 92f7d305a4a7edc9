"""A sweep whose jobs are the trials of an Optuna study. Only rank 0 imports Optuna; the others run what it asks for."""

import importlib
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override, RangeSweep
from hydra.errors import HydraException, InstantiationException
from hydra.plugins.launcher import Launcher
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from runner.config.schema import Config
from runner.errors import InputError
from runner.runs.ledger import DONE, read_ledger
from runner.sweeps.plan import Job, composed_words, first_value
from runner.sweeps.pruner import TrialPruner, open_storage
from runner.sweeps.study_metric import choose_metric
from runner.sweeps.sweep import Sweep

GIVEN_UP = ("failed", "refused")  # such a trial has ended: Optuna proposes others
JOURNAL = "study.journal"


@dataclass
class Options:
    """conf/hydra/sweeper/optuna.yaml."""

    metric: str  # null in the file until _check has chosen one
    direction: str
    n_trials: int
    n_jobs: int
    study_name: str | None
    storage: str | None
    params: dict[str, str]
    sampler: DictConfig
    pruner: DictConfig


@dataclass
class Study:
    """Rank 0's: what is proposed, and what came of it."""

    sweep: Sweep
    options: Options
    fixed: list[str]
    swept: dict[str, Override]
    study: Any

    def propose(self) -> list[tuple[Job, TrialPruner]]:
        """The next jobs, as many as are run at once; none when all have been."""
        known = read_ledger(self.path)
        left = min(self.options.n_jobs, self.options.n_trials - len(known))
        jobs = []
        for _ in range(left):
            trial = self.study.ask({key: distribution(override) for key, override in self.swept.items()})
            words = [*self.fixed, *(f"{key}={value}" for key, value in trial.params.items())]
            jobs.append((self.sweep.add(words, list(self.swept), trial=trial.number), self.pruner(trial.number)))
        return jobs

    def pruner(self, trial: int) -> TrialPruner:
        pruner: Any = OmegaConf.to_container(self.options.pruner)
        return TrialPruner(self.storage, self.study.study_name, trial, self.options.metric, pruner)

    def settle(self) -> None:
        """Tell the study of every trial that has ended and that it does not know of.

        Raises InputError where jobs have finished, and none with the metric: the others would not have it either.
        """
        from optuna.trial import TrialState

        trials, metric, jobs = self.study.get_trials(deepcopy=False), self.options.metric, read_ledger(self.path)
        finished = [job for job in jobs if job.state == "finished"]
        if finished and not any(metric in job.metrics for job in finished):
            raise InputError(
                f"hydra.sweeper.metric={metric}: {finished[0].label} has finished without it, so that there is nothing "
                f"to optimize; type one that it has: {', '.join(sorted(finished[0].metrics))}"
            )
        for job in jobs:
            if job.trial is None or trials[job.trial].state.is_finished():
                continue
            value = job.metrics.get(metric, math.nan)
            if job.state == "pruned":
                self.study.tell(job.trial, state=TrialState.PRUNED)
            elif job.state in GIVEN_UP or (job.state == "finished" and not math.isfinite(value)):
                self.study.tell(job.trial, state=TrialState.FAIL)
            elif job.state == "finished":
                self.study.tell(job.trial, value)

    def unfinished(self) -> list[tuple[Job, TrialPruner]]:
        """The jobs that were stopped on their way."""
        return [
            (Job(job.number, job.label, job.overrides), self.pruner(job.trial))
            for job in read_ledger(self.path)
            if job.trial is not None and job.state not in (*DONE, *GIVEN_UP)
        ]

    @property
    def path(self) -> Path:
        return Path(str(self.sweep.directory))

    @property
    def storage(self) -> str:
        return storage_of(self.options, self.path)


def run_study(
    sweep: Sweep,
    options: Options,
    arguments: Sequence[str],
    launcher: Launcher,
    master: DictConfig,
    loader: ConfigLoader,
) -> None:
    """Run the trials. All ranks must call it. Raises InputError, with nothing written, for wrong options."""
    words = [*(f"{key}={value}" for key, value in options.params.items()), *arguments]
    try:
        parsed = OverridesParser.create(config_loader=loader).parse_overrides(words)
    except HydraException as error:
        raise InputError(f"hydra.sweeper.params: {str(error).splitlines()[0]}") from None
    overrides = {override.get_key_element(): override for override in parsed}
    swept = {key: override for key, override in overrides.items() if override.is_sweep_override()}
    fixed = [f"{key}={o.get_value_element_as_str()}" for key, o in overrides.items() if key not in swept]
    sample = [*fixed, *(f"{key}={first_value(override)}" for key, override in swept.items())]

    def check(configs: Sequence[Config]) -> None:
        if sweep.rank_info.rank == 0:
            _check(options, swept, configs[0])
            _check_storage(sweep, options)
        if hasattr(launcher, "check"):
            launcher.check(configs)

    sweep.open([sample], list(swept), master, loader, check, asks=True)
    sweep.jobs = []
    study: list[Study] = []  # rank 0's alone

    def begin() -> str:
        study.append(_open(sweep, options, fixed, swept))
        study[0].settle()
        return _told(study[0].unfinished())

    def propose_next() -> str:
        study[0].settle()
        return _told(study[0].propose())

    asked = json.loads(sweep.share("trials", begin))
    num_asked = 0
    while asked or num_asked == 0:
        first = len(sweep.jobs)
        for job, pruner in asked:
            sweep.jobs.append(Job(**job))
            sweep.pruners[sweep.jobs[-1].number] = TrialPruner(**pruner)
        if asked:
            launcher.launch([composed_words(job.overrides) for job in sweep.jobs[first:]], initial_job_idx=first)
        num_asked += 1
        asked = json.loads(sweep.share(f"trials{num_asked}", propose_next))


def distribution(override: Override) -> Any:
    """Optuna's words for a sweep as Hydra's grammar has it; as in a grid, a range ends before its stop."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    value = override.value()
    kind: Any = FloatDistribution
    if isinstance(value, IntervalSweep):
        if isinstance(value.start, int) and isinstance(value.end, int):
            kind = IntDistribution
        return kind(value.start, value.end, log="log" in value.tags)
    if isinstance(value, RangeSweep) and not value.shuffle and value.step > 0:
        assert value.start is not None and value.stop is not None
        start, stop, step = (Decimal(str(number)) for number in (value.start, value.stop, value.step))
        last = type(value.step)(start + (math.ceil((stop - start) / step) - 1) * step)  # as typed: 0.1 + 2 * 0.1 is 0.3
        if isinstance(value.start, int) and isinstance(value.step, int):
            kind = IntDistribution
        return kind(value.start, last, step=value.step)
    return CategoricalDistribution(list(override.sweep_string_iterator()))


def storage_of(options: Options, directory: Path) -> str:
    return options.storage or str(directory / JOURNAL)


def _told(asked: Sequence[tuple[Job, TrialPruner]]) -> str:
    own = ("storage", "study_name", "trial", "metric", "pruner")
    return json.dumps([(asdict(job), {name: getattr(pruner, name) for name in own}) for job, pruner in asked])


def _open(sweep: Sweep, options: Options, fixed: list[str], swept: dict[str, Override]) -> Study:
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    path = Path(str(sweep.directory))
    direction: Any = options.direction
    study = optuna.create_study(
        storage=open_storage(storage_of(options, path)),
        study_name=options.study_name or path.name,
        direction=direction,
        load_if_exists=True,
    )
    trials = study.get_trials(deepcopy=False)
    if any(job.trial is not None and job.trial >= len(trials) for job in read_ledger(path)):
        raise InputError(
            f"hydra.sweeper.storage={options.storage}: the study {study.study_name} has not the trials of {path}; "
            "keep the storage and the name that the sweep was started with"
        )
    # A generator that starts anew would propose the first trials again.
    seed = options.sampler.get("seed")
    study.sampler = instantiate(options.sampler, **({} if seed is None else {"seed": seed + len(trials)}))
    return Study(sweep, options, fixed, swept, study)


def _check(options: Options, swept: dict[str, Override], config: Config) -> None:
    """What is wrong with the sweeper's options, before anything is written; sets those that are null by the job's."""
    try:
        importlib.import_module("optuna")
    except ImportError:
        raise InputError(
            "hydra/sweeper=optuna needs Optuna, which is not installed; pip install 'experiment-runner[optuna]'"
        ) from None
    if not swept:
        raise InputError("hydra/sweeper=optuna has nothing to vary; type a key as optimizer.lr=interval(0.001,0.1)")
    options.metric, options.direction = choose_metric(options.metric, options.direction, config)
    for name in ("n_trials", "n_jobs"):
        value = getattr(options, name)
        if not isinstance(value, int) or value < 1:
            raise InputError(f"hydra.sweeper.{name}={value} must be an integer of at least 1")
    for override in swept.values():
        try:
            distribution(override)
        except ValueError as error:
            raise InputError(f"{override.input_line}: {error}") from None
    for name in ("sampler", "pruner"):
        try:
            instantiate(getattr(options, name))
        except (InstantiationException, ValueError, TypeError) as error:
            raise InputError(f"hydra.sweeper.{name}: {str(error).splitlines()[0]}") from None


def _check_storage(sweep: Sweep, options: Options) -> None:
    """That the study can be kept there, and is of the direction if there is one."""
    import optuna

    where, name = options.storage, options.study_name
    if sweep.directory:
        own = Path(sweep.directory)
        where, name = storage_of(options, own), name or own.name
    if where is None:
        return  # it will be the sweep's own
    try:
        storage = optuna.storages.get_storage(open_storage(where))
    except Exception as error:  # the database's own kinds
        raise InputError(f"hydra.sweeper.storage={options.storage}: {str(error).splitlines()[0]}") from None
    known = {study.study_name: study.direction.name.lower() for study in optuna.get_all_study_summaries(storage)}
    if name in known and known[name] != options.direction:
        raise InputError(
            f"hydra.sweeper.direction={options.direction}: the study {name} is to {known[name]}; keep that, or name "
            "another"
        )
