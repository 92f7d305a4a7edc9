"""The metrics of the configuration made into objects, and the one of them that runs are compared by."""

from collections.abc import Collection, Mapping
from typing import Any, Literal

from runner.config.instantiate import check_contract, make_group
from runner.config.schema import Config
from runner.errors import InputError, did_you_mean
from runner.runs.monitor import BY_LOSS, LOSS, Monitor
from runner.training.metric import Metric
from runner.training.metric_sums import MetricSums
from runner.training.metrics.auto import Auto
from runner.training.metrics.torchmetrics_adapter import TorchMetric, is_torchmetric


def make_metrics(config: Config, loss: Any, outputs: Any, targets: Any) -> MetricSums:
    """Those of the configuration, tried on the outputs for one sample and on its targets (first dim 1).

    loss: what the options that are auto are taken from. outputs: None where the objective gives none. Raises InputError
    for what is no metric, or refuses its options or the sample.
    """
    of_loss = _options_of(loss)
    made: dict[str, Metric] = {}
    for name, node in config.metrics.items():
        metric = _make(name, node, of_loss)
        if isinstance(metric, Auto):
            made = {**metric.choose(outputs, targets, **of_loss), **made}
        elif outputs is None:
            raise InputError(
                f"metrics.{name}: the objective gives no outputs to measure; let its predict return them, or type "
                "metrics=none"
            )
        else:
            made[name] = metric
    return MetricSums(made, outputs, targets)


def declared_monitors(config: Config) -> tuple[list[Monitor], list[Monitor]]:
    """What can be said of the metrics before there are data.

    Those that say which end is their best, then the loss; and those that there may be, too. Raises InputError as
    make_metrics, but for the sample.
    """
    made = {name: _make(name, node, _options_of(None)) for name, node in config.metrics.items()}
    ends = {name: metric.higher_is_better for name, metric in made.items() if not isinstance(metric, Auto)}
    autos = [metric.possible.items() for metric in made.values() if isinstance(metric, Auto)]
    declared = [Monitor(f"val/{name}", _end(higher)) for name, higher in ends.items() if higher is not None]
    return [*declared, BY_LOSS], [Monitor(f"val/{name}", _end(higher)) for items in autos for name, higher in items]


def _options_of(loss: Any) -> dict[str, Any]:
    """What auto stands for in the options of a metric that reads classes as the loss does."""
    ignored, dim = getattr(loss, "ignore_index", None), getattr(loss, "class_dim", None)
    return {"ignore_index": ignored if isinstance(ignored, int) else None, "class_dim": dim if dim in (1, -1) else None}


def _make(name: str, node: Mapping[str, Any], of_loss: Mapping[str, int | None]) -> Metric | Auto:
    key, target = f"metrics.{name}", node["_target_"]
    options = {**node, **{name: value for name, value in of_loss.items() if node.get(name) == "auto"}}
    metric = make_group({key: target}, key, options)
    if isinstance(metric, Auto):
        return metric
    if is_torchmetric(metric):
        try:
            metric = TorchMetric(metric)
        except ValueError as error:
            raise InputError(f"{key}._target_={target}: {error}") from None
    check_contract(metric, Metric, key)
    return metric


def choose_monitor(config: Config, sums: MetricSums, losses: Collection[str] = ()) -> Monitor:
    """The configuration's, or else the first metric that says which end is its best, or else the loss.

    losses: names of those that the objective gives. Raises InputError for a monitor that is none of all these, or
    whose best end nobody says, and for a metric with the name of a loss.
    """
    ends: dict[str, bool | None] = {}
    for name, numbers in sums.names.items():
        if taken := [number for number in numbers if number in losses]:
            raise InputError(f"metrics.{name}: the objective gives a loss {taken[0]} already; give it another name")
        ends |= dict.fromkeys((f"val/{number}" for number in numbers), sums.metrics[name].higher_is_better)
    ends |= {LOSS: False} | dict.fromkeys((f"val/{name}" for name in losses), False)
    name = config.monitor or next(name for name, higher in ends.items() if higher is not None)
    if name not in ends:
        raise InputError(f"monitor={name}: no metric gives it{did_you_mean(name, list(ends))}")
    higher = ends[name]
    if config.monitor_direction is not None:
        return Monitor(name, _end(config.monitor_direction == "max"))
    if higher is None:
        raise InputError(
            f"monitor={name}: its metric does not say which end is the best; type monitor_direction=max, or min"
        )
    return Monitor(name, _end(higher))


def _end(higher_is_better: bool) -> Literal["max", "min"]:
    return "max" if higher_is_better else "min"
