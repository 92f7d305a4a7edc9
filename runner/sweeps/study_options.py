"""The options of hydra/sweeper=optuna: their checks, the metric of a study, and the distributions of its keys."""

import importlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import IntervalSweep, Override, RangeSweep
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf import DictConfig

from runner.config.diagnostics.import_target import locate
from runner.config.schema import Config
from runner.errors import InputError, did_you_mean
from runner.sweeps.pruner import open_storage

DIRECTIONS = {"max": "maximize", "min": "minimize"}
JOURNAL = "study.journal"


@dataclass
class Options:
    """conf/hydra/sweeper/optuna.yaml. `check_options` sets a metric and a direction that are null there."""

    metric: str
    direction: str
    n_trials: int
    n_jobs: int
    study_name: str | None
    storage: str | None
    params: dict[str, str]
    sampler: DictConfig
    pruner: DictConfig

    def storage_in(self, directory: Path) -> str:
        """Return the storage of the study of the sweep in this directory."""
        return self.storage or str(directory / JOURNAL)


def check_options(options: Options, swept: Mapping[str, Override], config: Config) -> None:
    """Raise InputError if an option is invalid. `config` is the configuration of the first job."""
    try:
        importlib.import_module("optuna")
    except ImportError:
        raise InputError(
            "hydra/sweeper=optuna needs Optuna, which is not installed; pip install 'experiment-runner[optuna]'"
        ) from None
    if not swept:
        raise InputError("hydra/sweeper=optuna has nothing to vary; set a key as optimizer.lr=interval(0.001,0.1)")
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


def check_storage(options: Options, directory: Path | None) -> None:
    """Raise InputError if the study cannot be stored, or is stored there with another direction.

    directory: of the sweep that is resumed; None for a new one.
    """
    import optuna

    storage, name = options.storage, options.study_name
    if directory is not None:
        storage, name = options.storage_in(directory), name or directory.name
    if storage is None:
        return  # a journal in the directory of the new sweep
    try:
        opened = optuna.storages.get_storage(open_storage(storage))
    except Exception as error:  # databases have their own classes
        raise InputError(f"hydra.sweeper.storage={options.storage}: {str(error).splitlines()[0]}") from None
    known = {study.study_name: study.direction.name.lower() for study in optuna.get_all_study_summaries(opened)}
    if name in known and known[name] != options.direction:
        raise InputError(
            f"hydra.sweeper.direction={options.direction}: the direction of study {name} is {known[name]}; keep it, or "
            "set another study_name"
        )


def choose_metric(metric: str | None, direction: str | None, config: Config) -> tuple[str, str]:
    """Return the metric and the direction of a study. The metrics of metrics=auto are unknown before data is loaded.

    Raises InputError if training does not produce the metric, and if its direction is unknown.
    """
    from runner.training.components import declared_monitors  # imports torch, which only Optuna's sweeps need here

    if direction is not None and direction not in DIRECTIONS.values():
        raise InputError(f"hydra.sweeper.direction={direction} must be minimize or maximize")
    declared, others = declared_monitors(config)
    losses = getattr(locate(config.objective["_target_"]), "losses", ())
    named = [str(name) for name in losses] if isinstance(losses, Mapping) else []
    possible = {monitor.name: str(monitor.direction) for monitor in (*declared, *others)}
    possible |= dict.fromkeys(
        [*(f"{split}/{name}" for name in named for split in ("val", "train")), "train/loss"], "min"
    )
    key, name = "monitor", config.monitor or declared[0].name
    if metric is not None:
        key, name = "hydra.sweeper.metric", metric
    known = next((known for known in possible if f"{name}/".startswith(f"{known}/")), None)  # val/f1 of val/f1/macro
    is_configured = any(f"{name}/".startswith(f"val/{known}/") for known in config.metrics)
    if locate(config.task["_target_"]).trains and known is None and not is_configured:
        raise InputError(f"{key}={name}: no such metric{did_you_mean(name, list(possible))}")
    if direction is None:
        end = (config.monitor_direction if name == config.monitor else None) or (possible[known] if known else None)
        if end is None:
            raise InputError(
                f"hydra.sweeper.direction=null: cannot infer whether {name} is to be minimized or maximized; set "
                "minimize or maximize"
            )
        direction = DIRECTIONS[end]
    return name, direction


def distribution(override: Override) -> Any:
    """Return Optuna's distribution for a sweep in Hydra's grammar; as in a grid, a range ends before its stop."""
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
        last = type(value.step)(start + (math.ceil((stop - start) / step) - 1) * step)  # exact: 0.1 + 2 * 0.1 is 0.3
        if isinstance(value.start, int) and isinstance(value.step, int):
            kind = IntDistribution
        return kind(value.start, last, step=value.step)
    return CategoricalDistribution(list(override.sweep_string_iterator()))
