"""Metrics of the class of each sample, token or pixel: accuracy, top-k accuracy and perplexity; and their choice."""

from collections.abc import Mapping
from typing import Any

import torch

from runner.objectives.losses import find_class_dim
from runner.training.metrics.contract import Metric
from runner.training.metrics.shapes import ClassDim, ClassDimOption, IgnoreIndex, counted, resolve_ignore_index


class Accuracy:
    """Correct positions / positions that count; positions of the class `ignore_index` do not count."""

    higher_is_better = True

    def __init__(self, ignore_index: IgnoreIndex = None, class_dim: ClassDimOption = None):
        self._ignored, self._classes = resolve_ignore_index(ignore_index), ClassDim(class_dim)

    def update(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Outputs (N, C), (N, C, ...) or (N, ..., C), targets (N, ...) -> (2,): correct and counted positions."""
        scores, classes = self._classes.flatten("accuracy", outputs, targets)
        counts = counted(classes, self._ignored)
        return torch.stack([((scores.argmax(-1) == classes) & counts).sum(), counts.sum()])

    def compute(self, sums: torch.Tensor) -> torch.Tensor:
        return sums[0] / sums[1]


class TopK:
    """Positions whose class is among the k highest scores / positions that count, as in top-5 accuracy.

    Source: Russakovsky et al., "ImageNet Large Scale Visual Recognition Challenge", 2015, section 4.1, as 1 - error.
    """

    higher_is_better = True

    def __init__(self, k: int = 5, ignore_index: IgnoreIndex = None, class_dim: ClassDimOption = None):
        if k < 1:
            raise ValueError(f"k={k} must be at least 1; try 5")
        self._k, self._ignored, self._classes = k, resolve_ignore_index(ignore_index), ClassDim(class_dim)

    def update(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Outputs and targets as of Accuracy -> (2,). Raise ValueError for fewer than k classes."""
        scores, classes = self._classes.flatten("top_k", outputs, targets)
        if self._k > scores.shape[-1]:
            raise ValueError(f"k={self._k} must be at most {scores.shape[-1]}, the number of classes")
        counts = counted(classes, self._ignored)
        hits = (scores.topk(self._k).indices == classes[:, None]).any(-1)
        return torch.stack([(hits & counts).sum(), counts.sum()])

    def compute(self, sums: torch.Tensor) -> torch.Tensor:
        return sums[0] / sums[1]


class Perplexity:
    """exp of the mean cross entropy of the positions that count, from logits or log-probabilities.

    Source: Jelinek, Mercer, Bahl, Baker, "Perplexity: a measure of the difficulty of speech recognition tasks", 1977.
    """

    higher_is_better = False

    def __init__(self, ignore_index: IgnoreIndex = None, class_dim: ClassDimOption = None):
        self._ignored, self._classes = resolve_ignore_index(ignore_index), ClassDim(class_dim)

    def update(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Outputs and targets as of Accuracy -> (2,): sum of -log p(target), positions that count."""
        logits, classes = self._classes.flatten("perplexity", outputs, targets)
        counts = counted(classes, self._ignored)
        logits, classes = logits[counts], classes[counts]
        scale = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
        # log_softmax leaves log-probabilities as they are: their exponentials sum to 1
        log_probabilities = scale.log_softmax(-1).gather(-1, classes[:, None].long())  # (positions, 1)
        return torch.stack([-log_probabilities.double().sum(), counts.sum().double()])

    def compute(self, sums: torch.Tensor) -> torch.Tensor:
        return (sums[0] / sums[1]).exp()


class Auto:
    """Placeholder for the metrics that fit outputs and targets; runner.training.components replaces it."""

    # The metrics that it may choose, each with its higher_is_better.
    possible: Mapping[str, bool] = {"accuracy": Accuracy.higher_is_better}

    def choose(self, outputs: Any, targets: Any, **of_loss: Any) -> dict[str, Metric]:
        """Return accuracy for integer classes, one per sample or per position, and else nothing.

        `of_loss` are Accuracy's options, as the loss has them.
        """
        if not isinstance(outputs, torch.Tensor) or not isinstance(targets, torch.Tensor):
            return {}
        kinds = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
        if targets.dtype not in kinds or find_class_dim(outputs, targets) is None:
            return {}
        return {"accuracy": Accuracy(**of_loss)}
