"""objective=supervised: the model's outputs for the inputs of a batch, and the loss of outputs and targets."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from runner.input.batch import MicroBatch, widen_integers
from runner.input.pytree import map_tensors, num_rows
from runner.objectives.losses import (
    CLASSES,
    ELEMENTWISE,
    NO_CLASS,
    OF_INDICES,
    OF_NUMBERS,
    Auto,
    Loss,
    WeightedSum,
    find_class_dim,
    fits,
    is_weighted_by_samples,
    zero_loss,
)
from runner.objectives.objective import Objective, Prediction, pass_values_of


class Supervised(Objective):
    """The mean of a loss of outputs and targets; `settle` must be called before it is used.

    A loss of torch has the weight that torch documents (classes, targets that are not ignored, elements). A custom
    loss has the weight that its method `weight_of(targets)` returns, or else is a mean over the samples.

    A loss of torch, and the metrics, get integer targets of any dtype as int64 if they are classes, and otherwise as
    numbers of the outputs' dtype. A custom loss gets the targets of the dataset.
    """

    def __init__(self, loss: nn.Module | Auto):
        self.function: Any = loss
        self.weighted_by_samples = True
        self._class_dim = 1
        self._squeezes = self._squeezes_targets = False
        self._sum: WeightedSum | None = None

    def settle(self, outputs: Any, targets: Any, ragged: bool) -> None:
        """Choose the loss, its weight and the layout of the outputs, given the outputs and targets of a sample.

        Raises ValueError if no loss fits. `ragged` means that other samples may have other shapes.
        """
        if isinstance(self.function, Auto):
            self.function = self.function.choose(targets, outputs)
        if isinstance(outputs, torch.Tensor) and isinstance(targets, torch.Tensor):
            self._squeezes_targets = isinstance(self.function, OF_INDICES) and _has_spare_dim(outputs, targets)
            targets = self.fit_targets(outputs, targets)
            self._squeezes = isinstance(self.function, ELEMENTWISE) and outputs.shape == (*targets.shape, 1)
            if isinstance(self.function, CLASSES) and not targets.is_floating_point():
                self._class_dim = getattr(self.function, "class_dim", None) or resolve_class_dim(outputs, targets)
                if targets.dim() == 1 and not getattr(self.function, "ignores_any", True):
                    self.function.ignore_index = NO_CLASS  # otherwise torch would ignore targets of -100
        self.weighted_by_samples = is_weighted_by_samples(self.function, targets, ragged)
        self._sum = None if self.weighted_by_samples else WeightedSum(self.function)

    def measure(self, model: Any, name: str, micro_batch: MicroBatch) -> Loss:
        outputs = call_model(model, micro_batch.inputs)
        measured = pass_values_of(self).outputs
        if measured is not None and micro_batch.num_samples:
            detached = map_tensors(torch.Tensor.detach, outputs)
            targets = self.fit_targets(outputs, micro_batch.targets)
            measured.append((detached, targets, micro_batch.indices))
        return self.local_loss(outputs, micro_batch)

    def evaluate(self, model: Any, micro_batch: MicroBatch) -> Prediction:
        return self.prediction(call_model(model, micro_batch.inputs), micro_batch)

    def prediction(self, outputs: Any, micro_batch: MicroBatch) -> Prediction:
        targets = self.fit_targets(outputs, micro_batch.targets)
        return Prediction({"loss": self.local_loss(outputs, micro_batch)}, outputs, targets)

    def local_loss(self, outputs: Any, micro_batch: MicroBatch) -> Loss:
        """Return the loss of the local samples; if there are none, a zero that depends on the parameters."""
        if micro_batch.num_samples == 0:
            return Loss(zero_loss(outputs, self.function), 0, is_mean=True)
        return self.loss_of(outputs, micro_batch.targets, micro_batch.num_samples)

    def loss_of(self, outputs: Any, targets: Any, num_samples: int | None = None) -> Loss:
        """Return the loss of a batch; `num_samples` is by default the targets' first dimension."""
        outputs, targets = self.arrange(outputs, targets)
        if self._sum is not None:
            return self._sum(outputs, targets)
        num_samples = num_rows(targets) if num_samples is None else num_samples
        return Loss(self.function(outputs, targets), num_samples, is_mean=True)

    def arrange(self, outputs: Any, targets: Any) -> tuple[Any, Any]:
        """Return outputs and targets in the layout and dtype that torch's losses expect."""
        targets = self.fit_targets(outputs, targets)
        if self._squeezes:
            return outputs.squeeze(-1), targets  # (N, 1) -> (N), one number per sample
        return (outputs.movedim(-1, 1) if self._class_dim == -1 else outputs), targets  # (N, ..., C) -> (N, C, ...)

    def fit_targets(self, outputs: Any, targets: Any) -> Any:
        """Return the targets in the dtype and shape that torch's losses and the metrics expect."""
        if not isinstance(targets, torch.Tensor) or targets.is_floating_point() or targets.is_complex():
            return targets
        if isinstance(self.function, OF_INDICES):
            classes = widen_integers(targets)
            return classes.squeeze(1) if self._squeezes_targets else classes  # (N, 1, ...) -> (N, ...)
        if isinstance(self.function, OF_NUMBERS) and isinstance(outputs, torch.Tensor):
            return targets.to(torch.promote_types(outputs.dtype, torch.float32))  # of autocast: in full precision
        return targets


def call_model(model: Any, inputs: Any) -> Any:
    """Return the model's outputs; inputs are a tensor, a tuple of arguments or a mapping of keyword arguments."""
    if isinstance(inputs, Mapping):
        return model(**inputs)
    if isinstance(inputs, (tuple, list)):
        return model(*inputs)
    return model(inputs)


def _has_spare_dim(outputs: torch.Tensor, targets: torch.Tensor) -> bool:
    """Return True for classes (N, 1, ...) of outputs (N, C, ...) with several classes."""
    if targets.is_floating_point() or targets.dim() < 2 or outputs.dim() != targets.dim():
        return False
    return outputs.shape[2:] == targets.shape[2:] and targets.size(1) == 1 < outputs.size(1)


def resolve_class_dim(outputs: torch.Tensor, targets: torch.Tensor) -> int:
    """Return the dim of the outputs that contains the classes: 1 for (N, C, ...), or -1 for (N, ..., C).

    If neither fits, return 1, so that torch's loss reports the mismatch. Raises ValueError if both fit.
    """
    if targets.dim() > 1 and fits(1, outputs, targets) and fits(-1, outputs, targets):
        raise ValueError(
            f"loss.class_dim=null: outputs {list(outputs.shape[1:])} for targets {list(targets.shape[1:])} may have "
            "the classes first or last; set loss.class_dim=1 or -1"
        )
    return find_class_dim(outputs, targets) or 1
