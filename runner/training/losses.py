"""Losses of outputs and targets with their true weight, and the loss that fits the data."""

import copy
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import nn

from runner.training.pytree import tensors

IGNORED_BY_TORCH = -100  # unless it is told otherwise
NOTHING = -(2**62)  # no class has this number

# Their mean is over the elements, not over the samples; by torch's documentation of each.
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


class Loss(Protocol):
    """The loss of some samples: a sum and the weight by which the mean over a whole batch divides."""

    @property
    def sum(self) -> torch.Tensor: ...  # (), float64

    @property
    def weight(self) -> torch.Tensor | float: ...

    def share(self, num_samples: int) -> torch.Tensor:
        """This loss by the number of samples of a whole batch: shares of that batch add up to its sum by its size."""


class MeanLoss(NamedTuple):
    """A mean over samples, whose weight is their number."""

    mean: torch.Tensor  # ()
    weight: int

    def share(self, num_samples: int) -> torch.Tensor:
        return self.mean * (self.weight / num_samples)

    @property
    def sum(self) -> torch.Tensor:
        return self.mean.double() * self.weight


class SumLoss(NamedTuple):
    """A sum with a weight that is not the number of samples: of classes, of tokens that are no padding."""

    total: torch.Tensor  # ()
    weight: torch.Tensor | float

    def share(self, num_samples: int) -> torch.Tensor:
        return self.total / num_samples

    @property
    def sum(self) -> torch.Tensor:
        return self.total.double()


class Auto:
    """Stands for the loss that fits the data's targets, until a sample of them is seen."""

    def choose(self, targets: Any, outputs: Any) -> nn.Module:
        """Cross entropy for classes (log-probabilities: their likelihood), mean squared error for numbers.

        targets: (N, ...) integers or numbers; outputs: the model's. Raises ValueError where either is no tensor.
        """
        for name, value in (("outputs", outputs), ("targets", targets)):
            if not isinstance(value, torch.Tensor):
                raise ValueError(f"{name} are a {type(value).__name__}, for which no loss is known; give your own")
        if targets.is_floating_point():
            return nn.MSELoss()
        return NLL() if targets.dim() == 1 and are_log_probabilities(outputs) else CrossEntropy()


def are_log_probabilities(outputs: torch.Tensor) -> bool:
    """Whether every row's exponentials sum to one. Logits do so only if they are log-probabilities already."""
    sums = outputs.double().exp().sum(-1)
    return torch.allclose(sums, torch.ones_like(sums), atol=1e-4)


class CrossEntropy(nn.CrossEntropyLoss):
    """torch's, by plain numbers.

    weight: of each class. ignore_index: the class that counts nothing; null is none where a sample has one class, and
    torch's -100 where it has several. class_dim: of the outputs, 1 or -1; null: the one that fits the targets.
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
    """torch's, of log-probabilities, by plain numbers; the options are those of CrossEntropy."""

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
    """torch's binary cross entropy of logits, by plain numbers. pos_weight: of the ones of each output."""

    def __init__(self, pos_weight: Sequence[float] | None = None):
        if pos_weight is not None and (not pos_weight or min(pos_weight) <= 0):
            raise ValueError(f"pos_weight={list(pos_weight)} must be numbers above 0, one per output")
        super().__init__(pos_weight=None if pos_weight is None else torch.tensor(pos_weight, dtype=torch.float32))


def _class_weights(weight: Sequence[float] | None) -> torch.Tensor | None:
    if weight is None:
        return None
    if not weight or min(weight) < 0 or max(weight) == 0:
        raise ValueError(f"weight={list(weight)} must be numbers of at least 0, one per class, not all 0")
    return torch.tensor(weight, dtype=torch.float32)


def counts_samples(loss: nn.Module, targets: Any, ragged: bool) -> bool:
    """Whether the loss of a batch is a mean whose weight is in proportion to the number of samples.

    targets: of some samples. ragged: those of other batches may have another shape.
    """
    if hasattr(loss, "weight_of"):
        return False
    if isinstance(loss, CLASSES) and not targets.is_floating_point():
        may_ignore = targets.dim() > 1 or getattr(loss, "ignores_any", True)
        return loss.weight is None and not may_ignore
    if isinstance(loss, (*ELEMENTWISE, *CLASSES)) and not _is_batch_mean(loss):
        return not ragged or targets.dim() < 2
    return True


class Summing:
    """The loss and its weight where that is not the number of samples."""

    def __init__(self, loss: nn.Module):
        self._loss = loss
        self._summed = copy.copy(loss)  # the same tensors
        if not hasattr(loss, "weight_of"):
            self._summed.reduction = "sum"  # type: ignore[assignment]

    def __call__(self, outputs: Any, targets: Any) -> SumLoss:
        if hasattr(self._loss, "weight_of"):
            weight = self._loss.weight_of(targets)  # type: ignore[operator]
            if float(weight) == 0:  # whatever the mean of nothing is
                return SumLoss(no_loss(outputs, self._loss), 0.0)
            return SumLoss(self._loss(outputs, targets) * weight, weight)
        return SumLoss(self._summed(outputs, targets), self._weight(outputs, targets))

    def _weight(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor | float:
        """What torch divides by where the reduction is the mean."""
        if not isinstance(self._loss, CLASSES):
            return float(outputs.numel())
        if targets.is_floating_point():  # probabilities of the classes
            return float(targets.numel() // targets.size(1))
        counted = targets != self._loss.ignore_index
        if self._loss.weight is None:
            return counted.sum()
        return self._loss.weight[targets[counted]].sum()


def no_loss(outputs: Any, loss: nn.Module) -> torch.Tensor:
    """A zero that still reaches the parameters, the loss's own too, as DDP's buckets need."""
    ends = [*tensors(outputs), *loss.parameters()]
    return torch.stack([tensor.float().sum() * 0.0 for tensor in ends]).sum()


def _is_batch_mean(loss: nn.Module) -> bool:
    return getattr(loss, "reduction", None) == "batchmean"
