"""The contract of an objective: what a step minimises, of whatever a batch holds."""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from runner.errors import InputError
from runner.training.batch import MicroBatch
from runner.training.losses import Loss, SumLoss


class Within(nn.Module):
    """Runs functions of a model in a forward of its own, whatever of the model they call and how often.

    What a wrapper does before and after a forward (DistributedDataParallel, fully_shard) is so done around all of it.
    """

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, function: Callable[..., Any], *args: Any) -> Any:
        return function(self.model, *args)


class Prediction(NamedTuple):
    """What an evaluation measures a micro-batch by."""

    losses: dict[str, Loss]
    outputs: Any = None  # for the metrics, with their targets; None: there are none
    targets: Any = None


class Objective:
    """Derive from it and define `loss`, or several losses.

    `losses` names them, each with a regular expression (re.search) of the names of the parameters that it trains: a
    step takes them in this order, each with an optimizer step of its own. A method of the same name gets the model,
    spread by its mode, and a batch as the data set makes it, on the device; it returns the sum over the samples and
    the weight that the mean over the whole batch divides by, two numbers or tensors ().

    An objective that is an nn.Module may have parameters and buffers: they belong to the model as `objective.NAME`.
    """

    losses: Mapping[str, str] = {"loss": ""}

    def loss(self, model: Any, batch: Any) -> tuple[Any, Any]:
        """(sum, weight) of the batch."""
        raise NotImplementedError(f"{type(self).__name__} has no loss(model, batch)")

    def predict(self, model: Any, batch: Any) -> tuple[Any, Any] | None:
        """(outputs, targets) for the metrics; None: there are none."""
        return None

    # -- what the runner calls ---------------------------------------------------------------------------------------

    counts_samples: bool = False  # the weight of each loss is the number of samples

    def measure(self, model: Any, name: str, micro_batch: MicroBatch) -> Loss:
        """One of the losses; of a share that counts nothing, a zero that still reaches the parameters."""
        result = getattr(self, name)(model, micro_batch.data)
        total, weight = as_pair(result, f"{type(self).__name__}.{name}")
        if micro_batch.num_samples == 0:
            return SumLoss(total.nan_to_num() * 0.0, 0.0)  # of no row it may be a mean, 0 / 0
        return SumLoss(total, weight)

    def evaluate(self, model: Any, micro_batch: MicroBatch) -> Prediction:
        """All losses, and what the metrics compare."""
        losses = {name: self.measure(model, name, micro_batch) for name in self.losses}
        outputs, targets = self.predict(model, micro_batch.data) or (None, None)
        return Prediction(losses, outputs, targets)


def as_pair(result: Any, name: str) -> tuple[torch.Tensor, torch.Tensor | float]:
    """The sum and the weight that a user's own loss returned. Raises TypeError for anything else."""
    wanted = f"{name} must return (sum, weight), the sum of the losses of a batch, a tensor (), and its weight"
    if not isinstance(result, tuple) or len(result) != 2:
        raise TypeError(f"{wanted}, not {type(result).__name__}")
    total, weight = result
    if not isinstance(total, torch.Tensor) or total.dim() != 0 or not total.is_floating_point():
        shape = f"of shape {list(total.shape)}" if isinstance(total, torch.Tensor) else f"a {type(total).__name__}"
        raise TypeError(f"{wanted}; its sum is {shape}")
    if isinstance(weight, torch.Tensor) and weight.dim() == 0:
        return total, weight.detach()
    if isinstance(weight, (int, float)):
        return total, float(weight)
    raise TypeError(f"{wanted}; its weight is a {type(weight).__name__}")


@dataclass(frozen=True)
class Turn:
    """One of the losses of a step, with the parameters that it trains."""

    name: str
    parameters: list[nn.Parameter]
    others: list[nn.Parameter]  # trained in other turns

    @property
    def is_only(self) -> bool:
        return not self.others


def turns(objective: Objective, module: nn.Module) -> list[Turn]:
    """In their order. The parameters are the module's as they are now: a mode may replace them."""
    trained = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
    if len(objective.losses) == 1:
        (only,) = objective.losses
        return [Turn(only, list(module.parameters()), [])]
    return [Turn(name, *_split(trained.items(), pattern)) for name, pattern in objective.losses.items()]


def _split(trained: Iterable[tuple[str, nn.Parameter]], pattern: str) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    own: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, parameter in trained:
        (own if re.search(pattern, name) else others).append(parameter)
    return own, others


def check_names(objective: Objective) -> None:
    """Raises InputError where its losses are none, whatever the model."""
    name, losses = type(objective).__name__, objective.losses
    if not isinstance(losses, Mapping) or not losses:
        raise InputError(
            f"objective: {name}.losses={losses!r} must map the name of each loss to the regular expression of the "
            "parameters that it trains, as {'loss': ''}"
        )
    for loss, pattern in losses.items():
        if not callable(getattr(objective, loss, None)):
            raise InputError(f"objective: {name}.losses names {loss}, but {name} has no method {loss}(model, batch)")
        try:
            re.compile(pattern)
        except (re.error, TypeError) as error:
            raise InputError(
                f"objective: {name}.losses[{loss!r}]={pattern!r} is no regular expression: {error}"
            ) from None


def check_patterns(objective: Objective, module: nn.Module) -> None:
    """Raises InputError where its losses do not train the parameters of this model."""
    name = type(objective).__name__
    trained = [name for name, parameter in module.named_parameters() if parameter.requires_grad]
    if not trained:
        return  # the optimizer's factory says so
    listed = ", ".join(trained[:3]) + (", ..." if len(trained) > 3 else "")
    for loss, pattern in objective.losses.items():
        if not any(re.search(pattern, parameter) for parameter in trained):
            raise InputError(
                f"objective: {name}.losses[{loss!r}]={pattern!r} matches no trained parameter; there are {listed}"
            )
    patterns = list(objective.losses.values())
    if idle := [p for p in trained if not any(re.search(pattern, p) for pattern in patterns)]:
        raise InputError(
            f"objective: {name}.losses trains all but {idle[0]}; add it to a pattern, or freeze it (requires_grad)"
        )
