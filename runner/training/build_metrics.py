"""The metrics of the configuration made into objects, and the one of them that runs are compared by."""

from typing import Any

from runner.config.instantiate import check_contract, make_group
from runner.config.schema import Config
from runner.errors import InputError, did_you_mean
from runner.runs.monitor import Monitor
from runner.training.metric import Metric
from runner.training.metric_sums import MetricSums
from runner.training.metrics.auto import Auto
from runner.training.metrics.torchmetrics_adapter import TorchMetric, is_torchmetric

LOSS = "loss"  # what every evaluation measures beside the metrics


def make_metrics(config: Config, loss: Any, outputs: Any, targets: Any) -> MetricSums:
    """Those of the configuration, tried on the outputs for one sample and on its targets (first dim 1).

    loss: what ignore_index=auto is taken from. Raises InputError for what is no metric, or refuses its options or the
    sample.
    """
    ignored = getattr(loss, "ignore_index", None)
    made: dict[str, Metric] = {}
    for name, node in config.metrics.items():
        key, target = f"metrics.{name}", node["_target_"]
        if node.get("ignore_index") == "auto":
            node = {**node, "ignore_index": ignored if isinstance(ignored, int) else None}
        metric = make_group({key: target}, key, node)
        if isinstance(metric, Auto):
            chosen = metric.choose(outputs, targets, ignored if isinstance(ignored, int) else None)
            made = {**chosen, **made}
            continue
        if is_torchmetric(metric):
            try:
                metric = TorchMetric(metric)
            except ValueError as error:
                raise InputError(f"{key}._target_={target}: {error}") from None
        check_contract(metric, Metric, key)
        made[name] = metric
    return MetricSums(made, outputs, targets)


def choose_monitor(config: Config, sums: MetricSums) -> Monitor:
    """The configuration's, or else the first metric that says which end is its best, or else the loss.

    Raises InputError for one that no metric gives, or whose best end nobody says.
    """
    ends: dict[str, bool | None] = {
        f"val/{number}": sums.metrics[name].higher_is_better
        for name, numbers in sums.names.items()
        for number in numbers
    }
    ends[f"val/{LOSS}"] = False
    name = config.monitor or next(name for name, higher in ends.items() if higher is not None)
    if name not in ends:
        raise InputError(f"monitor={name}: no metric gives it{did_you_mean(name, list(ends))}")
    higher = ends[name]
    if config.monitor_direction is not None:
        return Monitor(name, "max" if config.monitor_direction == "max" else "min")
    if higher is None:
        raise InputError(
            f"monitor={name}: its metric does not say which end is the best; type monitor_direction=max, or min"
        )
    return Monitor(name, "max" if higher else "min")
