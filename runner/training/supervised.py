"""objective=supervised: the model's outputs for the inputs of a batch, and the loss of outputs and targets."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from runner.training.batch import MicroBatch
from runner.training.losses import CLASSES, ELEMENTWISE, NOTHING, Auto, Loss, MeanLoss, Summing, counts_samples, no_loss
from runner.training.metrics.class_dim import find_class_dim, fits
from runner.training.objective import Objective, Prediction
from runner.training.pytree import num_rows


class Supervised(Objective):
    """loss: called with outputs and targets, returns their mean; `settle` comes before it is used.

    A loss has the weight that torch gives it (classes, ignored targets, elements), or what its own method
    `weight_of(targets)` says; else it is a mean over the samples.
    """

    def __init__(self, loss: nn.Module | Auto):
        self.function: Any = loss
        self.counts_samples = True
        self._class_dim = 1
        self._squeezes = False
        self._sum: Summing | None = None

    def settle(self, outputs: Any, targets: Any, ragged: bool) -> None:
        """Fit the loss to a sample's outputs and targets. Raises ValueError where none fits.

        ragged: other batches may have other shapes.
        """
        if isinstance(self.function, Auto):
            self.function = self.function.choose(targets, outputs)
        if isinstance(outputs, torch.Tensor) and isinstance(targets, torch.Tensor):
            self._squeezes = isinstance(self.function, ELEMENTWISE) and outputs.shape == (*targets.shape, 1)
            if isinstance(self.function, CLASSES) and not targets.is_floating_point():
                self._class_dim = getattr(self.function, "class_dim", None) or settle_class_dim(outputs, targets)
                if targets.dim() == 1 and not getattr(self.function, "ignores_any", True):
                    self.function.ignore_index = NOTHING  # -100 would otherwise be one that counts nothing
        self.counts_samples = counts_samples(self.function, targets, ragged)
        self._sum = None if self.counts_samples else Summing(self.function)

    def loss(self, model: Any, batch: Any) -> tuple[Any, Any]:
        result = self.of_outputs(call(model, batch[0]), batch[1])
        return result.sum, result.weight

    def measure(self, model: Any, name: str, micro_batch: MicroBatch) -> Loss:
        return self.of_share(call(model, micro_batch.inputs), micro_batch)

    def evaluate(self, model: Any, micro_batch: MicroBatch) -> Prediction:
        return self.prediction(call(model, micro_batch.inputs), micro_batch)

    def prediction(self, outputs: Any, micro_batch: MicroBatch) -> Prediction:
        return Prediction({"loss": self.of_share(outputs, micro_batch)}, outputs, micro_batch.targets)

    def of_share(self, outputs: Any, micro_batch: MicroBatch) -> Loss:
        """Of a share that counts nothing, a zero that still reaches the parameters."""
        if micro_batch.num_samples == 0:
            return MeanLoss(no_loss(outputs, self.function), 0)
        return self.of_outputs(outputs, micro_batch.targets, micro_batch.num_samples)

    def of_outputs(self, outputs: Any, targets: Any, num_samples: int | None = None) -> Loss:
        """The loss of a batch; num_samples: null is the targets' first dimension."""
        outputs = self.arrange(outputs)
        if self._sum is not None:
            return self._sum(outputs, targets)
        return MeanLoss(self.function(outputs, targets), num_rows(targets) if num_samples is None else num_samples)

    def arrange(self, outputs: Any) -> Any:
        """The outputs as torch's losses take them."""
        if self._squeezes:
            return outputs.squeeze(-1)  # (N, 1) -> (N), one number per sample
        return outputs.movedim(-1, 1) if self._class_dim == -1 else outputs  # (N, ..., C) -> (N, C, ...)


def call(model: Any, inputs: Any) -> Any:
    """The model's outputs: inputs are a tensor, a tuple of arguments or a mapping of keyword arguments."""
    if isinstance(inputs, Mapping):
        return model(**inputs)
    if isinstance(inputs, (tuple, list)):
        return model(*inputs)
    return model(inputs)


def settle_class_dim(outputs: torch.Tensor, targets: torch.Tensor) -> int:
    """Where outputs have the classes of such targets: 1 as (N, C, ...), or -1 as (N, ..., C). Raises ValueError where
    both fit; where neither does, it is 1, and torch's loss tells what is wrong."""
    if targets.dim() > 1 and fits(1, outputs, targets) and fits(-1, outputs, targets):
        raise ValueError(
            f"class_dim=null: outputs {list(outputs.shape[1:])} for targets {list(targets.shape[1:])} may have the "
            "classes first or last; set loss.class_dim=1 or -1"
        )
    return find_class_dim(outputs, targets) or 1
