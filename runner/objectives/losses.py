"""Losses of outputs and targets with their exact weights, and the loss that fits the data."""

import copy
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from runner.input.pytree import tensors
from runner.tensor_values import has_values

IGNORED_BY_TORCH = -100  # the default of ignore_index
NO_CLASS = -(2**62)  # an ignore_index that equals no target

# torch's losses that are means over the elements of outputs and targets of equal shapes, as torch documents them;
# then those that are means over classes. With reduction=sum, each returns the sum of the same terms.
ELEMENTWISE = (
    nn.BCELoss,
    nn.BCEWithLogitsLoss,
    nn.HingeEmbeddingLoss,
    nn.HuberLoss,
    nn.KLDivLoss,
    nn.L1Loss,
    nn.MSELoss,
    nn.PoissonNLLLoss,
    nn.SmoothL1Loss,
    nn.SoftMarginLoss,
)
CLASSES = (nn.CrossEntropyLoss, nn.NLLLoss)
# torch's losses whose integer targets are indices of classes; then those whose targets are numbers.
OF_INDICES = (*CLASSES, nn.MultiMarginLoss, nn.MultiLabelMarginLoss)
OF_NUMBERS = (*ELEMENTWISE, nn.MultiLabelSoftMarginLoss)


class Loss(NamedTuple):
    """The loss of some samples, and the weight that the mean over a whole batch divides by.

    `value` is the sum over the samples, or with `is_mean` their mean; then the weight is their number. With terms, both
    have one number per term.
    """

    value: torch.Tensor  # () or (terms,)
    weight: torch.Tensor | float
    is_mean: bool = False

    def divided_by(self, num_samples: int) -> torch.Tensor:
        """Return the sum divided by the number of samples of a whole batch, ()."""
        return self.value * (self.weight / num_samples) if self.is_mean else self.value / num_samples

    @property
    def sum(self) -> torch.Tensor:
        """The sum over the samples, () in float64."""
        return self.value.double() * self.weight if self.is_mean else self.value.double()


class Auto:
    """Placeholder for the loss that fits the data's targets."""

    def choose(self, targets: Any, outputs: Any) -> nn.Module:
        """Return cross entropy for classes (NLL if the outputs are log-probabilities), and MSE for real numbers.

        Raises ValueError if the outputs or the targets are not a tensor.
        """
        for name, value in (("outputs", outputs), ("targets", targets)):
            if not isinstance(value, torch.Tensor):
                raise ValueError(
                    f"loss=auto: {name} are a {type(value).__name__}, for which no loss is known; set a custom loss"
                )
        if targets.is_floating_point():
            return nn.MSELoss()
        is_log = targets.dim() == 1 and has_values(outputs) and are_log_probabilities(outputs)
        return NLL() if is_log else CrossEntropy()


def are_log_probabilities(outputs: torch.Tensor) -> bool:
    """Return True if the exponentials of every row sum to 1, or if the outputs have no values."""
    if not has_values(outputs):
        return True
    sums = outputs.double().exp().sum(-1)
    return torch.allclose(sums, torch.ones_like(sums), atol=1e-4)


class CrossEntropy(nn.CrossEntropyLoss):
    """torch's cross entropy, with options that YAML can express.

    Args:
        weight: The weight of each class.
        ignore_index: A class that has no weight. None means no class if a sample has one target, and torch's -100 if
            it has several.
        class_dim: The dim of the outputs that contains the classes, 1 or -1. None infers it from the shapes.
    """

    def __init__(
        self,
        label_smoothing: float = 0.0,
        weight: Sequence[float] | None = None,
        ignore_index: int | None = None,
        class_dim: Literal[1, -1] | None = None,
    ):
        if not 0 <= label_smoothing <= 1:
            raise ValueError(f"label_smoothing={label_smoothing} must be from 0 to 1; try 0.1")
        ignored = IGNORED_BY_TORCH if ignore_index is None else ignore_index
        super().__init__(_class_weights(weight), ignore_index=ignored, label_smoothing=label_smoothing)
        self.ignores_any, self.class_dim = ignore_index is not None, class_dim


class NLL(nn.NLLLoss):
    """torch's negative log-likelihood of log-probabilities; the options are those of CrossEntropy."""

    def __init__(
        self,
        weight: Sequence[float] | None = None,
        ignore_index: int | None = None,
        class_dim: Literal[1, -1] | None = None,
    ):
        ignored = IGNORED_BY_TORCH if ignore_index is None else ignore_index
        super().__init__(_class_weights(weight), ignore_index=ignored)
        self.ignores_any, self.class_dim = ignore_index is not None, class_dim


class BCE(nn.BCEWithLogitsLoss):
    """torch's binary cross entropy of logits; pos_weight is the weight of the positive targets of each output."""

    def __init__(self, pos_weight: Sequence[float] | None = None):
        if pos_weight is not None and (not pos_weight or min(pos_weight) <= 0):
            raise ValueError(f"pos_weight={list(pos_weight)} must be numbers above 0, one per output")
        super().__init__(pos_weight=None if pos_weight is None else torch.tensor(pos_weight, dtype=torch.float32))


def find_class_dim(outputs: torch.Tensor, targets: torch.Tensor) -> Literal[1, -1] | None:
    """Return the dim of the outputs that the targets do not have: 1 or -1; 1, as in torch's losses, if both fit."""
    if fits(1, outputs, targets):
        return 1
    return -1 if fits(-1, outputs, targets) else None


def fits(dim: Literal[1, -1], outputs: torch.Tensor, targets: torch.Tensor) -> bool:
    """Return True if the outputs have the shape of the targets except for this dim."""
    if outputs.dim() != targets.dim() + 1:
        return False
    shape = list(outputs.shape)
    del shape[dim]
    return shape == list(targets.shape)


def _class_weights(weight: Sequence[float] | None) -> torch.Tensor | None:
    if weight is None:
        return None
    if not weight or min(weight) < 0 or max(weight) == 0:
        raise ValueError(f"weight={list(weight)} must be numbers of at least 0, one per class, not all 0")
    return torch.tensor(weight, dtype=torch.float32)


def is_weighted_by_samples(loss: nn.Module, targets: Any, ragged: bool) -> bool:
    """Return True if the loss of a batch is a mean whose weight is proportional to the number of samples.

    If `ragged`, other targets may have another shape. Raises ValueError for a loss of torch whose weight is unknown.
    """
    if hasattr(loss, "weight_of"):
        return False
    same_shape = not ragged or (isinstance(targets, torch.Tensor) and targets.dim() < 2)
    if isinstance(loss, CLASSES) and not targets.is_floating_point():
        return loss.weight is None and targets.dim() == 1 and not getattr(loss, "ignores_any", True)
    if getattr(loss, "reduction", None) == "batchmean":
        return True
    if isinstance(loss, (*ELEMENTWISE, *CLASSES)):
        return same_shape
    # torch's other losses are means over the samples, unless they ignore some targets.
    of_torch = [base.__name__ for base in type(loss).__mro__ if base.__module__ == nn.MSELoss.__module__]
    is_of_torch = any(not name.startswith("_") for name in of_torch)
    if is_of_torch and (hasattr(loss, "ignore_index") or not same_shape):
        raise ValueError(
            f"loss._target_={type(loss).__module__}.{type(loss).__qualname__}: the weight of this loss of torch is "
            "unknown for these targets; derive a class from it that has a method weight_of(targets)"
        )
    return True


class WeightedSum:
    """A loss whose weight is not the number of samples; a call returns the sum of a batch and its weight."""

    def __init__(self, loss: nn.Module):
        self._loss = loss
        self._summed = copy.copy(loss)  # shares the tensors
        if not hasattr(loss, "weight_of"):
            self._summed.reduction = "sum"  # type: ignore[assignment]

    def __call__(self, outputs: Any, targets: Any) -> Loss:
        if hasattr(self._loss, "weight_of"):
            weight = self._loss.weight_of(targets)  # type: ignore[operator]
            if float(weight) == 0:  # the mean over nothing may be NaN
                return Loss(zero_loss(outputs, self._loss), 0.0)
            return Loss(self._loss(outputs, targets) * weight, weight)
        return Loss(self._summed(outputs, targets), self._weight(outputs, targets))

    def _weight(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor | float:
        """Return the number that torch divides the sum by with reduction=mean."""
        if not isinstance(self._loss, CLASSES):
            return float(outputs.numel())
        if targets.is_floating_point():  # probabilities of the classes
            return float(targets.numel() // targets.size(1))
        counted = targets != self._loss.ignore_index
        if self._loss.weight is None:
            return counted.sum()
        return self._loss.weight[targets[counted]].sum()


def zero_loss(outputs: Any, loss: nn.Module) -> torch.Tensor:
    """Return a zero that depends on the outputs and on the loss's parameters, as DDP's buckets require."""
    ends = [*tensors(outputs), *loss.parameters()]
    return torch.stack([tensor.float().sum() * 0.0 for tensor in ends]).sum()
