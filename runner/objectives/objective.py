"""The contract of an objective: what a step minimizes, for any structure of batches."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from runner.errors import InputError
from runner.input.batch import MicroBatch
from runner.objectives.losses import Loss
from runner.optimization.parameter_patterns import counted


class ForwardWrapper(nn.Module):
    """Calls a function of a model in its forward, so that a wrapper's hooks run once around the whole function.

    DistributedDataParallel and fully_shard act before and after a forward; the function may call any submodules of the
    model, any number of times.
    """

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, function: Callable[..., Any], *args: Any) -> Any:
        return function(self.model, *args)


class Prediction(NamedTuple):
    """The losses of a micro-batch in an evaluation, with the outputs and targets that the metrics compare."""

    losses: dict[str, Loss]
    outputs: Any = None  # None without metrics
    targets: Any = None


class Objective:
    """The base class of objectives. Derive from it and define `loss`, or several losses.

    An objective that is also an nn.Module may have parameters and buffers; the model contains them as
    `objective.NAME`.

    Attributes:
        losses: The name of each loss with a regular expression (re.search) of the names of the parameters that it
            trains. A step computes the losses in this order, and makes an optimizer step after each. The method of
            the same name is called with the model, prepared by its mode, and with a batch as the dataset collates it,
            on the device. It returns the sum over the samples, and the weight that the mean over the whole batch
            divides by: two numbers or scalar tensors.
        weighted_by_samples: The weight of each loss is the number of samples.
    """

    losses: Mapping[str, str] = {"loss": ""}
    weighted_by_samples: bool = False

    def loss(self, model: Any, batch: Any) -> tuple[Any, Any]:
        """Return (sum, weight) of the batch."""
        raise NotImplementedError(f"{type(self).__name__} has no loss(model, batch)")

    def predict(self, model: Any, batch: Any) -> tuple[Any, Any] | None:
        """Return (outputs, targets) for the metrics, or None for no metrics."""
        return None

    def measure(self, model: Any, name: str, micro_batch: MicroBatch) -> Loss:
        """Return one of the losses; for a micro-batch without local samples, a zero that depends on the parameters."""
        result = getattr(self, name)(model, micro_batch.data)
        total, weight = as_sum_and_weight(result, f"{type(self).__name__}.{name}")
        if micro_batch.num_samples == 0:
            return Loss(total.nan_to_num() * 0.0, 0.0)  # a mean over no rows is NaN
        return Loss(total, weight)

    def evaluate(self, model: Any, micro_batch: MicroBatch) -> Prediction:
        """Return all losses, and the outputs and targets for the metrics."""
        losses = {name: self.measure(model, name, micro_batch) for name in self.losses}
        outputs, targets = self.predict(model, micro_batch.data) or (None, None)
        return Prediction(losses, outputs, targets)


def as_sum_and_weight(result: Any, name: str) -> tuple[torch.Tensor, torch.Tensor | float]:
    """Return the sum and the weight that a custom loss returned. Raise TypeError for anything else."""
    if isinstance(result, tuple) and len(result) == 2:
        total, weight = result
        is_sum = isinstance(total, torch.Tensor) and total.dim() == 0 and total.is_floating_point()
        if is_sum and isinstance(weight, torch.Tensor) and weight.dim() == 0:
            return total, weight.detach()
        if is_sum and isinstance(weight, (int, float)):
            return total, float(weight)
    kinds = ", ".join(type(value).__name__ for value in (result if isinstance(result, tuple) else [result]))
    raise TypeError(
        f"{name} must return (sum, weight), the sum of the losses of a batch as a scalar tensor, and its weight; not "
        f"{kinds}"
    )


@dataclass(frozen=True)
class LossGroup:
    """One of the losses of a step, with the parameters that it trains."""

    name: str
    parameters: list[nn.Parameter]
    other_parameters: list[nn.Parameter]  # those that the other losses train

    @property
    def is_only(self) -> bool:
        return not self.other_parameters


def loss_groups(objective: Objective, module: nn.Module) -> list[LossGroup]:
    """Return the objective's losses in order, with the module's current parameters; a mode may replace them later."""
    if len(objective.losses) == 1:
        (only,) = objective.losses
        return [LossGroup(only, list(module.parameters()), [])]
    groups = []
    trained = [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]
    for loss, pattern in objective.losses.items():
        matches = [(parameter, re.search(pattern, name)) for name, parameter in trained]
        groups.append(LossGroup(loss, [p for p, match in matches if match], [p for p, match in matches if not match]))
    return groups


def check_losses(objective: Objective, module: nn.Module) -> None:
    """Raise InputError if `losses` does not map names to regular expressions that match all trained parameters."""
    name, losses = type(objective).__name__, objective.losses
    if not isinstance(losses, Mapping) or not losses:
        raise InputError(f"objective: {name}.losses={losses!r} must map names of losses to regular expressions")
    trained = [name for name, parameter in module.named_parameters() if parameter.requires_grad]
    matched: set[str] = set()
    for loss, pattern in losses.items():
        try:
            own = {parameter for parameter in trained if re.search(pattern, parameter)}
        except (re.error, TypeError) as error:
            reason = f"is not a regular expression: {error}"
        else:
            reason = "" if own or not trained else f"matches no trained parameter; there are {counted(trained, 3)}"
            matched |= own
        if reason:
            raise InputError(f"objective: {name}.losses[{loss!r}]={pattern!r} {reason}") from None
    if idle := [parameter for parameter in trained if parameter not in matched]:
        raise InputError(
            f"objective: {name}.losses trains all parameters except {idle[0]}; add it to a pattern, or freeze it"
        )
