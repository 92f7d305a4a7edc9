"""The options of hydra/sweeper=optuna, the metric of a study and the distributions of its keys, and its pruner."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import IntervalSweep, Override, RangeSweep
from omegaconf import DictConfig, OmegaConf

from runner.config.diagnostics.import_target import locate
from runner.config.diagnostics.type_hints import show
from runner.config.instantiate import create
from runner.config.schema import Config
from runner.errors import InputError, as_input_error, did_you_mean, first_line, require_packages
from runner.sweeps.rungs import Rungs

DIRECTIONS = {"max": "maximize", "min": "minimize"}


@dataclass
class StudyOptions:
    """The options of conf/hydra/sweeper/optuna.yaml. `check_study` replaces a metric or direction that is null."""

    metric: str
    direction: str
    n_trials: int
    n_jobs: int
    study_name: str | None
    storage: str | None
    params: dict[str, str]
    sampler: DictConfig
    pruner: DictConfig


def check_study(options: StudyOptions, swept: Mapping[str, Override], config: Config) -> None:
    """Raise InputError if an option is invalid. `config` is the configuration of the first job."""
    require_packages("hydra/sweeper=optuna", "optuna", "optuna")
    if not swept:
        raise InputError("hydra/sweeper=optuna has nothing to vary; set a key as optimizer.lr=interval(0.001,0.1)")
    options.metric, options.direction = choose_metric(options.metric, options.direction, config)
    for name in ("n_trials", "n_jobs"):
        value = getattr(options, name)
        if not isinstance(value, int) or value < 1:
            raise InputError(f"hydra.sweeper.{name}={value} must be an integer of at least 1")
    for override in swept.values():
        with as_input_error(f"{override.input_line}: "):
            distribution(override)
    for name in ("sampler", "pruner"):
        try:
            created = create(OmegaConf.to_container(getattr(options, name)))
        except InputError:
            raise
        except Exception as error:  # of any type, raised by the constructor
            raise InputError(f"hydra.sweeper.{name}: {first_line(error)}") from None
        if isinstance(created, Rungs):
            _check_rungs(created, options.metric, swept, config)


def _check_rungs(rungs: Rungs, metric: str, swept: Mapping[str, Override], config: Config) -> None:
    """Raise InputError if no trial could ever pause, as far as is known before the data is loaded."""
    named = "hydra/sweeper/pruner=asha pauses trials at evaluations before the end of a run"
    if metric.startswith("train/"):
        raise InputError(f"hydra.sweeper.metric={metric}: {named}, which have no {metric}; set a metric of evaluations")
    if swept.keys() & {"epochs", "eval_every", "eval_every_steps", "max_steps"}:
        return  # the trials differ
    last = config.max_steps or math.inf
    if config.eval_every >= config.epochs and (config.eval_every_steps or math.inf) >= last:
        raise InputError(
            f"eval_every_steps={show(config.eval_every_steps)}: {named}; with eval_every={config.eval_every}, epochs="
            f"{config.epochs} and max_steps={show(config.max_steps)} there is none; set a smaller eval_every_steps"
        )
    least = f"hydra.sweeper.pruner.min_resource={rungs.min_resource}"
    if rungs.min_resource >= last:
        raise InputError(f"{least} must be below max_steps={last}")
    if config.eval_every >= config.epochs and config.max_steps and config.eval_every_steps:
        newest = (config.max_steps - 1) // config.eval_every_steps * config.eval_every_steps
        if rungs.min_resource > newest:
            raise InputError(f"{least}: {named}; the last one is after step {newest}; set at most {newest}")


def choose_metric(metric: str | None, direction: str | None, config: Config) -> tuple[str, str]:
    """Return the metric and the direction of a study. The metrics of metrics=auto are unknown before data is loaded.

    Raises InputError if the direction of the metric is unknown.
    """
    from runner.training.components import declared_monitors  # imports torch, which only Optuna's sweeps need here

    if direction is not None and direction not in DIRECTIONS.values():
        raise InputError(f"hydra.sweeper.direction={direction} must be minimize or maximize")
    declared, others = declared_monitors(config.metrics)
    losses = getattr(locate(config.objective["_target_"]), "losses", ())
    best = {monitor.name: str(monitor.direction) for monitor in (*declared, *others)}
    best |= dict.fromkeys([*(f"{split}/{loss}" for loss in losses for split in ("val", "train")), "train/loss"], "min")
    name = metric or config.monitor or declared[0].name
    if direction is None:
        known = next((known for known in best if f"{name}/".startswith(f"{known}/")), "")  # val/f1 of val/f1/macro
        max_or_min = (config.monitor_direction if name == config.monitor else None) or best.get(known)
        if max_or_min is None:
            raise InputError(
                f"hydra.sweeper.direction=null: cannot infer whether {name} is to be minimized or maximized"
                f"{did_you_mean(name, list(best))}; set minimize or maximize"
            )
        direction = DIRECTIONS[max_or_min]
    return name, direction


def distribution(override: Override) -> Any:
    """Return Optuna's distribution for a sweep in Hydra's grammar; as in a grid, a range ends before its stop."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    value = override.value()
    if isinstance(value, IntervalSweep):
        is_integer = isinstance(value.start, int) and isinstance(value.end, int)
        kind: Any = IntDistribution if is_integer else FloatDistribution
        return kind(value.start, value.end, log="log" in value.tags)
    if isinstance(value, RangeSweep) and not value.shuffle and value.step > 0:
        assert value.start is not None and value.stop is not None
        start, stop, step = (Decimal(str(number)) for number in (value.start, value.stop, value.step))
        last = type(value.step)(start + (math.ceil((stop - start) / step) - 1) * step)  # exact: 0.1 + 2 * 0.1 is 0.3
        is_integer = isinstance(value.start, int) and isinstance(value.step, int)
        kind = IntDistribution if is_integer else FloatDistribution
        return kind(value.start, last, step=value.step)
    return CategoricalDistribution(list(override.sweep_string_iterator()))


@dataclass
class TrialPruner:
    """Reports a trial's metric to its study, and returns True if the study's pruner ends or pauses the trial.

    Only rank 0 calls it, possibly in another process, for which it is pickled before the first call.
    """

    storage: str
    study_name: str
    trial: int
    metric: str
    pruner: dict[str, Any]
    pause_at: int | None = None  # with hydra/sweeper/pruner=asha

    def __post_init__(self) -> None:
        self._trial: Any = None
        self._reported_steps: set[int] = set()

    def __call__(self, step: int, metrics: dict[str, float]) -> bool:
        if self.metric not in metrics:
            return False
        if self._trial is None:
            import optuna

            pruner = create(self.pruner) if self.pause_at is None else optuna.pruners.NopPruner()
            study = optuna.load_study(study_name=self.study_name, storage=open_storage(self.storage), pruner=pruner)
            recorded = study.get_trials(deepcopy=False)[self.trial]
            self._trial = optuna.trial.Trial(study, recorded._trial_id)
            self._reported_steps = set(recorded.intermediate_values)  # those of earlier attempts
        if step not in self._reported_steps:
            self._trial.report(metrics[self.metric], step)
            self._reported_steps.add(step)
        return bool(self._trial.should_prune()) if self.pause_at is None else step >= self.pause_at


class PausedAsPruned:
    """A storage in which paused trials are pruned ones, from whose values a sampler learns.

    In the real storage they are running: Optuna would not accept another value of a pruned trial that is promoted.
    """

    def __init__(self, storage: Any):
        self._storage = storage

    def __getattr__(self, name: str) -> Any:
        if name == "_storage":  # of a copy, before its attributes are set
            raise AttributeError(name)
        return getattr(self._storage, name)

    def get_all_trials(self, study_id: int, deepcopy: bool = True, states: Any = None) -> list[Any]:
        from optuna.trial import TrialState

        trials = self._storage.get_all_trials(study_id, deepcopy=True)
        for trial in trials:
            if trial.state == TrialState.RUNNING and trial.intermediate_values:
                trial.state = TrialState.PRUNED
        return [trial for trial in trials if states is None or trial.state in states]


def open_storage(storage: str) -> Any:
    """Open the storage of a study, given the URL of a database or the path of a journal file."""
    from optuna.storages import JournalStorage, get_storage
    from optuna.storages.journal import JournalFileBackend

    if "://" in storage:
        return get_storage(storage)
    return JournalStorage(JournalFileBackend(str(Path(storage).absolute())))
