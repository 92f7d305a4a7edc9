"""The share of samples, tokens or pixels whose class has the highest score."""

import torch

from runner.training.metrics.class_dim import ClassDim, ClassDimOption, IgnoreIndex, as_ignored, counted


class Accuracy:
    """Correct positions / positions that count. ignore_index: a class that does not count; null: all do."""

    higher_is_better = True

    def __init__(self, ignore_index: IgnoreIndex = None, class_dim: ClassDimOption = None):
        self._ignored, self._classes = as_ignored(ignore_index), ClassDim(class_dim)

    def update(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Outputs (N, C), (N, C, ...) or (N, ..., C), targets (N, ...) -> (2,): correct ones, and those counted."""
        scores, classes = self._classes.last("accuracy", outputs, targets)
        counts = counted(classes, self._ignored)
        return torch.stack([((scores.argmax(-1) == classes) & counts).sum(), counts.sum()])

    def compute(self, sums: torch.Tensor) -> torch.Tensor:
        return sums[0] / sums[1]
