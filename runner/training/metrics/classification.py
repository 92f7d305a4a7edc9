"""Metrics of the class of each sample, token or pixel: accuracy, top-k accuracy and perplexity; and their choice."""

from typing import Any

import torch

from runner.objectives.losses import find_class_dim
from runner.training.metrics.contract import Metric
from runner.training.metrics.shapes import ClassDim, ClassMetric, IgnoreIndex


class Accuracy(ClassMetric):
    """Correct positions / positions that count."""

    higher_is_better = True

    def update(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Outputs (N, C), (N, C, ...) or (N, ..., C), targets (N, ...) -> (2,): correct and counted positions."""
        scores, classes = self.positions(outputs, targets)
        hits = scores.argmax(-1) == classes
        return torch.stack([hits.sum(), hits.new_tensor(len(hits), dtype=torch.int64)])


class TopK(ClassMetric):
    """Positions whose class is among the k highest scores / positions that count, as in top-5 accuracy.

    Source: Russakovsky et al., "ImageNet Large Scale Visual Recognition Challenge", 2015, section 4.1, as 1 - error.
    """

    higher_is_better = True

    def __init__(self, k: int = 5, ignore_index: IgnoreIndex = None, class_dim: ClassDim = None):
        if k < 1:
            raise ValueError(f"k={k} must be at least 1; try 5")
        super().__init__(ignore_index, class_dim)
        self._k = k

    def update(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Outputs and targets as of Accuracy -> (2,)."""
        scores, classes = self.positions(outputs, targets)
        hits = (scores.topk(self._k).indices == classes[:, None]).any(-1)
        return torch.stack([hits.sum(), hits.new_tensor(len(hits), dtype=torch.int64)])


class Perplexity(ClassMetric):
    """exp of the mean cross entropy of the positions that count, from logits or log-probabilities.

    Source: Jelinek, Mercer, Bahl, Baker, "Perplexity: a measure of the difficulty of speech recognition tasks", 1977.
    """

    higher_is_better = False

    def update(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Outputs and targets as of Accuracy -> (2,): sum of -log p(target), positions that count."""
        logits, classes = self.positions(outputs, targets)
        scale = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
        # log_softmax leaves log-probabilities as they are: their exponentials sum to 1
        losses = -scale.log_softmax(-1).gather(-1, classes[:, None]).double()  # (positions, 1)
        return torch.stack([losses.sum(), losses.new_tensor(len(losses))])

    def compute(self, sums: torch.Tensor) -> torch.Tensor:
        return (sums[0] / sums[1]).exp()


class Auto:
    """Placeholder for the metrics that fit outputs and targets; runner.training.components replaces it."""

    def choose(self, outputs: Any, targets: Any, **of_loss: Any) -> dict[str, Metric]:
        """Return accuracy, with options of the loss, for integer classes per sample or position; else nothing."""
        if not isinstance(outputs, torch.Tensor) or not isinstance(targets, torch.Tensor):
            return {}
        dim = None if targets.is_floating_point() or targets.is_complex() else find_class_dim(outputs, targets)
        if dim is None or outputs.size(dim) == 1:  # a single output is a number, such as a count
            return {}
        return {"accuracy": Accuracy(**of_loss)}
