"""The components that the configuration selects: mode, objective, metrics, monitor, logger and callbacks."""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from runner.config.diagnostics.signature import accepts
from runner.config.instantiate import check_contract, make_group
from runner.errors import InputError, did_you_mean
from runner.input.batch import MicroBatch
from runner.objectives.losses import Auto as AutoLoss
from runner.objectives.objective import Objective
from runner.objectives.supervised import Supervised
from runner.optimization.parameter_patterns import keep_in_evaluation_mode
from runner.optimization.precision import convert
from runner.records.loggers.composite import CompositeLogger
from runner.records.loggers.contract import Logger
from runner.records.monitor import BY_LOSS, Direction, Monitor
from runner.training.callbacks.contract import STOPS, Callback
from runner.training.first_samples import FirstSamples
from runner.training.metrics.classification import Auto as AutoMetrics
from runner.training.metrics.contract import Metric
from runner.training.metrics.metric_sums import MetricSums
from runner.training.metrics.torchmetrics_adapter import TorchMetric, is_torchmetric
from runner.training.mode import Parallel
from runner.training.model.deferred_init import BuiltModel
from runner.training.model.positions import split_positions
from runner.training.model.submodules import attach_submodule

RESERVED = ("grad_norm", "learning_rate", "skipped_steps")  # what a step logs itself, besides its losses


@dataclass(frozen=True)
class Components:
    """The components of an experiment that its dry runs call.

    Attributes:
        choices: The option of each group.
        parallel: The mode.
        model: The model.
        objective: What a step minimizes.
        samples: The first samples of the training data.
        indices: The samples of an evaluation: one, or two if BatchNorm needs them.
    """

    choices: Mapping[str, str]
    parallel: Parallel
    model: BuiltModel
    objective: Objective
    samples: FirstSamples
    indices: Sequence[int]

    @property
    def module(self) -> nn.Module:
        return self.model.module

    @property
    def is_ragged(self) -> bool:
        """True if targets may have other shapes than those of the first sample, such as fewer positions."""
        return hasattr(self.samples.source, "collate") or self.parallel.resolved_axes.sequence > 1

    def sample(self) -> MicroBatch:
        """Return the samples of an evaluation, in float32."""
        return self.samples.batch(self.indices)


def make_parallel(node: dict[str, Any], choices: Mapping[str, str]) -> Parallel:
    """Construct the mode. Raise InputError for a class that is not a mode."""
    parallel: Parallel = make_group(choices, "parallel", node)
    check_contract(parallel, Parallel, "parallel")
    return parallel


def make_objective(
    node: dict[str, Any], loss: dict[str, Any], choices: Mapping[str, str], parallel: Parallel
) -> Objective:
    """Construct the objective. Raise InputError for an invalid option, and if the mode does not support it.

    node, loss: the configuration of the objective and of the loss.
    """
    target = node["_target_"]
    given = {"loss": make_group(choices, "loss", loss)} if accepts(target, "loss") else {}
    if not given and loss["_target_"] != f"{AutoLoss.__module__}.{AutoLoss.__qualname__}":
        raise InputError(f"loss={choices['loss']} has no effect on objective={choices['objective']}, which takes none")
    objective: Objective = make_group(choices, "objective", node, **given)
    if not isinstance(objective, Objective):
        raise InputError(f"objective._target_={target}: derive it from runner.Objective")
    is_supervised, several = isinstance(objective, Supervised), len(objective.losses) > 1
    _check_values(objective, choices)
    supported = parallel.supported_objectives
    kind = "needs all samples of a step" if objective.gathers else "has named terms" if objective.terms else ""
    if kind and supported != "several_losses":
        raise InputError(
            f"objective={choices['objective']} {kind}, which parallel={choices['parallel']} does not support; try "
            "parallel=none, ddp, allreduce, zero or fsdp"
        )
    if (supported == "supervised" and not is_supervised) or (supported != "several_losses" and several):
        problem = f"has {len(objective.losses)} losses" if several else "calls the model itself"
        raise InputError(
            f"objective={choices['objective']} {problem}, which parallel={choices['parallel']} does not support; "
            "try parallel=ddp or parallel=fsdp"
        )
    return objective


def _check_values(objective: Objective, choices: Mapping[str, str]) -> None:
    """Raise InputError for invalid `terms` or `logged`."""
    named = f"objective={choices['objective']}"
    factors = list(objective.terms.values()) if isinstance(objective.terms, Mapping) else [None]
    if not all(isinstance(factor, (int, float)) and math.isfinite(factor) for factor in factors):
        raise InputError(f"{named}: terms={objective.terms!r} must map names to coefficients")
    if objective.terms and list(objective.losses) != ["loss"]:
        raise InputError(f"{named} has terms, which need a single loss named `loss`, not {list(objective.losses)}")
    taken = [*objective.value_names, *objective.losses, *RESERVED]
    if twice := {name for name in objective.value_names if taken.count(name) > 1}:
        raise InputError(f"{named}: the name {min(twice)} occurs twice in terms and logged, or is reserved; rename it")


def check_gathers(objective: Objective, choices: Mapping[str, str], micro_batches: int) -> None:
    """Raise InputError if a loss that compares the samples of a step has several micro-batches."""
    if objective.gathers and micro_batches != 1:
        raise InputError(
            f"micro_batches={micro_batches} splits the samples that objective={choices['objective']} compares; try "
            "micro_batches=1 on more ranks"
        )


def attach_objective(module: nn.Module, objective: Objective, device: torch.device, dtype: torch.dtype) -> None:
    """Move the objective or its loss to the device. If it has parameters, add it to the model as a submodule.

    An objective with buffers is added too. Submodules in evaluation mode, such as a teacher, stay in that mode.
    """
    name, part = ("loss", objective.function) if isinstance(objective, Supervised) else ("objective", objective)
    if isinstance(part, nn.Module):
        part.to(device=device)
        convert(part, dtype)
        has_state = any(True for _ in part.parameters()) or (name == "objective" and bool(part.state_dict()))
        if has_state:
            attach_submodule(module, name, part)
            for submodule in [each for each in part.modules() if not each.training]:
                keep_in_evaluation_mode(submodule)


def make_metrics(nodes: Mapping[str, Any], loss: Any, outputs: Any, targets: Any, num_parts: int = 1) -> MetricSums:
    """Construct the metrics, and try each on one sample's outputs and targets (first dim 1).

    Options that are `auto` take the loss's values. num_parts: the number of ranks that measure different positions of
    the same samples. Raises InputError for an unsuitable metric.
    """
    loss_options = _loss_options(loss)
    metrics: dict[str, Metric] = {}
    for name, node in nodes.items():
        metric = _make_metric(name, node, loss_options)
        if isinstance(metric, AutoMetrics):
            metrics = {**metric.choose(outputs, targets, **loss_options), **metrics}
        elif outputs is None:
            raise InputError(
                f"metrics.{name}: the objective returns no outputs to measure; return them from its predict method, "
                "or set metrics=none"
            )
        else:
            metrics[name] = metric
    sums = MetricSums(metrics, outputs, targets)
    if num_parts == 1:
        return sums
    if unsuitable := sums.not_of_parts(outputs, targets, split_positions(targets.size(1), num_parts)):
        raise InputError(
            f"parallel.sequence={num_parts}: metrics.{unsuitable[0]} is not computed from sums over the positions; "
            "remove it, or try parallel.shard"
        )
    return sums


def check_train_metrics(
    choices: Mapping[str, str], parallel: Parallel, objective: Objective, metrics: MetricSums
) -> None:
    """Raise InputError unless the outputs of a step can be measured."""
    if not isinstance(objective, Supervised):
        raise InputError(
            f"train_metrics=true needs the outputs of a step, which objective={choices['objective']} does not return; "
            "use Objective.log instead"
        )
    if parallel.supported_objectives == "supervised":
        raise InputError(
            f"train_metrics=true: parallel={choices['parallel']} has no outputs of a step; try parallel=ddp"
        )
    if not metrics.names:
        raise InputError("train_metrics=true has no effect without metrics; try metrics=auto")


def declared_monitors(nodes: Mapping[str, Any]) -> tuple[list[Monitor], list[Monitor]]:
    """Return the possible monitors of the configured metrics, without loading the data.

    The first list has the metrics that declare a direction, then the loss; the second those that `auto` may choose.
    """
    declared, possible = [], []
    for name, node in nodes.items():
        metric = _make_metric(name, node, _loss_options(None))
        if isinstance(metric, AutoMetrics):
            possible.append(Monitor("val/accuracy", "max"))
        elif metric.higher_is_better is not None:
            declared.append(Monitor(f"val/{name}", "max" if metric.higher_is_better else "min"))
    return [*declared, BY_LOSS], possible


def _loss_options(loss: Any) -> dict[str, Any]:
    """Return the loss's values for the metrics' options that are `auto`."""
    ignored, dim = getattr(loss, "ignore_index", None), getattr(loss, "class_dim", None)
    return {"ignore_index": ignored if isinstance(ignored, int) else None, "class_dim": dim if dim in (1, -1) else None}


def _make_metric(name: str, node: Mapping[str, Any], loss_options: Mapping[str, int | None]) -> Metric | AutoMetrics:
    key, target = f"metrics.{name}", node["_target_"]
    options = {**node, **{option: value for option, value in loss_options.items() if node.get(option) == "auto"}}
    metric: Metric | AutoMetrics = make_group({key: target}, key, options)
    if isinstance(metric, AutoMetrics):
        return metric
    if is_torchmetric(metric):
        metric = TorchMetric(f"{key}._target_={target}", metric)
    check_contract(metric, Metric, key)
    return metric


def declared_directions(metrics: Mapping[str, Metric], losses: Iterable[str]) -> dict[str, Direction]:
    """Return the direction of each metric that declares one, and of the losses, by name."""
    higher_is_better = {name: metric.higher_is_better for name, metric in metrics.items()}
    higher_is_better |= dict.fromkeys(["loss", *losses], False)
    return {name: "max" if higher else "min" for name, higher in higher_is_better.items() if higher is not None}


def choose_monitor(
    name: str | None,
    direction: Direction | None,
    sums: MetricSums,
    directions: Mapping[str, Direction],
    losses: Collection[str] = (),
    logged: Collection[str] = (),
) -> Monitor:
    """Return the configured monitor, or else the first metric that declares a direction, or else the loss.

    Raises InputError for an unknown monitor or direction, and for a metric with a name in `losses` or `logged`.
    """
    declaring: dict[str, str] = {}  # the name in `directions` of each value of an evaluation
    for metric, values in sums.names.items():
        if not set(values).isdisjoint([*losses, *logged]):
            raise InputError(f"metrics.{metric}: the objective logs a value of this name; rename the metric")
        declaring |= dict.fromkeys((f"val/{value}" for value in values), metric)
    declaring |= {f"val/{value}": value for value in (*logged, "loss", *losses)}
    name = name or next(each for each, metric in declaring.items() if metric in directions)
    if name not in declaring:
        raise InputError(f"monitor={name}: no metric returns it{did_you_mean(name, list(declaring))}")
    direction = direction or directions.get(declaring[name])
    if direction is None:
        raise InputError(
            f"monitor={name}: its metric does not declare whether a higher value is better; set monitor_direction=max "
            "or monitor_direction=min"
        )
    return Monitor(name, direction)


def make_logger(nodes: Mapping[str, Any]) -> Logger:
    """Construct the loggers, combined into one. Raise InputError for an invalid option or logger."""
    loggers = _make_named("logger", nodes)
    for name, logger in loggers.items():
        check_contract(logger, Logger, f"logger.{name}")
    return CompositeLogger(loggers)


def make_callbacks(nodes: Mapping[str, Any]) -> dict[str, Callback]:
    """Construct the custom callbacks, by name. Raise InputError for an invalid option or callback."""
    callbacks = _make_named("callbacks", nodes)
    for name, callback in callbacks.items():
        at = f"callbacks.{name}._target_={nodes[name]['_target_']}"
        if not isinstance(callback, Callback):
            raise InputError(f"{at}: not a callback; derive it from runner.Callback")
        if callback.stops_as not in STOPS:
            raise InputError(f"{at}: stops_as={callback.stops_as!r} must be {', '.join(STOPS[:-1])} or {STOPS[-1]}")
    return callbacks


def _make_named(group: str, nodes: Mapping[str, Any]) -> dict[str, Any]:
    keys = {name: f"{group}.{name}" for name in nodes}
    return {name: make_group({keys[name]: node["_target_"]}, keys[name], node) for name, node in nodes.items()}
