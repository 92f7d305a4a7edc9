"""What a study optimizes: what is typed for it, or else what its runs are compared by."""

from collections.abc import Mapping

from runner.config.diagnostics.import_target import locate
from runner.config.schema import Config
from runner.errors import InputError, did_you_mean

DIRECTIONS = {"max": "maximize", "min": "minimize"}


def choose_metric(metric: str | None, direction: str | None, config: Config) -> tuple[str, str]:
    """The metric and its direction, by the first job's configuration. metrics=auto is not known before there are data.

    Raises InputError for a metric that no training gives, and where nobody says its direction.
    """
    from runner.training.build_metrics import declared_monitors  # torch, which no other sweep needs here

    if direction is not None and direction not in DIRECTIONS.values():
        raise InputError(f"hydra.sweeper.direction={direction} must be minimize or maximize")
    declared, others = declared_monitors(config)
    losses = [f"{split}/{name}" for name in _losses(config) for split in ("val", "train")]
    possible = {monitor.name: str(monitor.direction) for monitor in (*declared, *others)}
    possible |= dict.fromkeys([*losses, "train/loss"], "min")
    key, name = "monitor", config.monitor or declared[0].name
    if metric is not None:
        key, name = "hydra.sweeper.metric", metric
    whole = next((known for known in possible if f"{name}/".startswith(f"{known}/")), None)  # val/f1 of val/f1/macro
    neutral = any(f"{name}/".startswith(f"val/{known}/") for known in config.metrics)
    if locate(config.task["_target_"]).trains and whole is None and not neutral:
        raise InputError(f"{key}={name}: no such metric{did_you_mean(name, list(possible))}")
    if direction is None:
        end = config.monitor_direction if name == config.monitor else None
        end = end or (possible[whole] if whole else None)
        if end is None:
            raise InputError(
                f"hydra.sweeper.direction=null: nobody says which end of {name} is the best; type minimize or maximize"
            )
        direction = DIRECTIONS[end]
    return name, direction


def _losses(config: Config) -> list[str]:
    """The names of those of the objective, where its class says them."""
    named = getattr(locate(config.objective["_target_"]), "losses", ())
    return [str(name) for name in named] if isinstance(named, Mapping) else []
