"""The contract of an objective: what a step minimizes, for any structure of batches."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from runner.distributed.collectives import GatheredRows, gather_rows
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


class PassValues:
    """What an objective adds up in the passes of a step or of an evaluation, beside its losses.

    Attributes:
        outputs: (outputs, targets, indices) of each micro-batch; None unless they are measured.
        counts: False while the loss of an uncounted sample is computed.
    """

    def __init__(self, keeps_outputs: bool = False):
        self.outputs: list[tuple[Any, Any, Sequence[int]]] | None = [] if keeps_outputs else None
        self.counts = True
        self._sums: dict[str, torch.Tensor] = {}  # by name of a term or logged value: sum and weight, (2,) in float64

    def add(self, name: str, total: Any, weight: Any) -> None:
        """Add a number or scalar tensor and its weight."""
        pair = [torch.as_tensor(value).detach().double() for value in (total, weight)]
        device = next((value.device for value in pair if value.device.type != "cpu"), pair[0].device)
        added = torch.stack([value.to(device, non_blocking=True) for value in pair])
        self._sums[name] = self._sums.get(name, 0.0) + added

    def sums(self, names: Sequence[str], device: torch.device) -> torch.Tensor:
        """Return the local sums and weights of these values, (names, 2) in float64."""
        if not names:  # launches no kernel in each step
            return torch.zeros(0, 2, dtype=torch.float64, device=device)
        zero = torch.zeros(2, dtype=torch.float64, device=device)
        return torch.stack([self._sums.get(name, zero).to(device, non_blocking=True) for name in names])


class Objective:
    """The base class of objectives. Derive from it and define `loss`, with or without named terms, or several losses.

    An objective that is also an nn.Module may have parameters and buffers; the model contains them as
    `objective.NAME`.

    Attributes:
        losses: The name of each loss with a regular expression (re.search) of the names of the parameters that it
            trains. A step computes the losses in this order, and makes an optimizer step after each. The method of
            the same name is called with the model, prepared by its mode, and with a batch as the dataset collates it,
            on the device. It returns the sum over the samples, a scalar tensor, and the weight that the mean over the
            whole batch divides by, a number or a scalar tensor.
        terms: The coefficient of each named term of `loss`, which then returns {name: (sum, weight)}. A step minimizes
            the sum of the terms' means over the whole batch, each multiplied by its coefficient.
        logged: The names of the values that the objective logs with `log`.
        gathers: True if a loss compares all samples of a step, and calls `gather`.
        weighted_by_samples: True if the weight of each loss is the number of samples.
    """

    losses: Mapping[str, str] = {"loss": ""}
    terms: Mapping[str, float] = {}
    logged: Sequence[str] = ()
    gathers: bool = False
    weighted_by_samples: bool = False
    _pass_values: PassValues | None = None  # see `pass_values_of`

    def loss(self, model: Any, batch: Any) -> tuple[Any, Any]:
        """Return (sum, weight) of the batch, or with `terms` {name: (sum, weight)}."""
        raise NotImplementedError(f"{type(self).__name__} has no loss(model, batch)")

    def predict(self, model: Any, batch: Any) -> tuple[Any, Any] | None:
        """Return (outputs, targets) for the metrics, or None for no metrics."""
        return None

    def gather(self, rows: torch.Tensor) -> GatheredRows:
        """Return the rows of all ranks, with gradients, and the index of the first local row.

        rows: (n, ...) for n local samples; the other dims must be equal on all ranks. A rank without samples passes an
        uncounted row, which is appended to its own result only. All ranks must call it the same number of times.
        Raises TypeError unless the class declares `gathers = True`.
        """
        if not self.gathers:
            raise TypeError(f"{type(self).__name__}.gather needs the attribute gathers = True")
        return gather_rows(rows, pass_values_of(self).counts)

    def log(self, name: str, total: Any, weight: Any = 1.0) -> None:
        """Log the mean of a value over a whole step or evaluation: the sum of `total` divided by that of `weight`.

        total, weight: numbers or scalar tensors of the local samples. Raises ValueError for a name that is not in
        `logged`.
        """
        if name not in self.value_names:
            raise ValueError(f"log: add {name!r} to {type(self).__name__}.logged, whose names are {[*self.logged]}")
        if (values := pass_values_of(self)).counts:
            values.add(name, total, weight)

    @property
    def value_names(self) -> list[str]:
        """The names of the terms and of the logged values."""
        return [*self.terms, *self.logged]

    def measure(self, model: Any, name: str, micro_batch: MicroBatch) -> Loss:
        """Return one of the losses, or all terms of `loss`, which are also logged.

        Without local samples, the values are zeros that depend on the parameters.
        """
        what, is_counted = f"{type(self).__name__}.{name}", micro_batch.num_samples > 0
        values = pass_values_of(self)
        values.counts = is_counted
        try:
            result = getattr(self, name)(model, micro_batch.data)
            if not self.terms:
                return _as_loss(result, what, is_counted)
            if not isinstance(result, Mapping) or result.keys() != self.terms.keys():
                raise TypeError(f"{what} must return {{name: (sum, weight)}} with the names {list(self.terms)}")
            losses = [_as_loss(result[term], f"{what}, {term},", is_counted) for term in self.terms]
            for term, loss in zip(self.terms, losses, strict=True):
                self.log(term, loss.value, loss.weight)
        finally:
            values.counts = True
        device = losses[0].value.device
        weights = [torch.as_tensor(loss.weight).to(device, torch.float64, non_blocking=True) for loss in losses]
        return Loss(torch.stack([loss.value for loss in losses]), torch.stack(weights))

    def evaluate(self, model: Any, micro_batch: MicroBatch) -> Prediction:
        """Return all losses, and the outputs and targets for the metrics."""
        losses = {name: self.measure(model, name, micro_batch) for name in self.losses}
        outputs, targets = self.predict(model, micro_batch.data) or (None, None)
        return Prediction(losses, outputs, targets)


def pass_values_of(objective: Objective) -> PassValues:
    """Return what the objective adds up in the current passes."""
    if objective._pass_values is None:
        objective._pass_values = PassValues()
    return objective._pass_values


def begin_passes(objective: Objective, keeps_outputs: bool = False) -> PassValues:
    """Let the next passes add up their values from zero, and return these values."""
    objective._pass_values = PassValues(keeps_outputs)
    return objective._pass_values


@contextmanager
def separate_passes(objective: Objective) -> Iterator[None]:
    """Add up the values of passes in this context separately, and drop them."""
    outer = objective._pass_values
    objective._pass_values = None
    try:
        yield
    finally:
        objective._pass_values = outer


def _as_loss(result: Any, name: str, is_counted: bool) -> Loss:
    """Return the sum and the weight that a custom loss returned. Raise TypeError for anything else."""
    if isinstance(result, tuple) and len(result) == 2:
        total, weight = result
        is_sum = isinstance(total, torch.Tensor) and total.dim() == 0 and total.is_floating_point()
        is_number = isinstance(weight, (int, float)) or (isinstance(weight, torch.Tensor) and weight.dim() == 0)
        if is_sum and is_number:
            if not is_counted:
                return Loss(total.nan_to_num() * 0.0, 0.0)  # a mean over no rows is NaN
            return Loss(total, weight.detach() if isinstance(weight, torch.Tensor) else float(weight))
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


def loss_groups(objective: Objective, module: nn.Module) -> list[LossGroup]:
    """Return the objective's losses in order, with the module's current parameters; a mode may replace them later.

    Raise InputError if `losses` does not map names to regular expressions that match all trained parameters.
    """
    kind, losses = type(objective).__name__, objective.losses
    if not isinstance(losses, Mapping) or not losses:
        raise InputError(f"objective: {kind}.losses={losses!r} must map names of losses to regular expressions")
    trained = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
    groups, idle = [], set(trained)
    for loss, pattern in losses.items():
        option = f"objective: {kind}.losses[{loss!r}]={pattern!r}"
        try:
            own = {name for name in trained if re.search(pattern, name)}
        except (re.error, TypeError) as error:
            raise InputError(f"{option} is not a regular expression: {error}") from None
        if trained and not own:
            raise InputError(f"{option} matches no trained parameter; there are {counted([*trained], 3)}")
        idle -= own
        others = [parameter for name, parameter in trained.items() if name not in own]
        groups.append(LossGroup(loss, [trained[name] for name in trained if name in own], others))
    if idle:
        first = next(name for name in trained if name in idle)
        raise InputError(
            f"objective: {kind}.losses trains all parameters except {first}; add it to a pattern, or freeze it"
        )
    if len(groups) == 1:  # its optimizer also has the frozen parameters
        return [LossGroup(groups[0].name, list(module.parameters()), [])]
    return groups
