"""The share of samples, tokens or pixels whose class is among the k highest scores."""

import torch

from runner.training.metrics.class_dim import ClassDim, ClassDimOption, IgnoreIndex, as_ignored, counted


class TopK:
    """Positions whose class is among the k highest / positions that count; as top-5 accuracy.

    Source: Russakovsky et al., "ImageNet Large Scale Visual Recognition Challenge", 2015, section 4.1, as 1 - error.
    """

    higher_is_better = True

    def __init__(self, k: int = 5, ignore_index: IgnoreIndex = None, class_dim: ClassDimOption = None):
        if k < 1:
            raise ValueError(f"k={k} must be at least 1; try 5")
        self._k, self._ignored, self._classes = k, as_ignored(ignore_index), ClassDim(class_dim)

    def update(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """As Accuracy. Raises ValueError where there are fewer than k classes."""
        scores, classes = self._classes.last("top_k", outputs, targets)
        if self._k > scores.shape[-1]:
            raise ValueError(f"k={self._k} must be at most {scores.shape[-1]}, the number of classes that are scored")
        counts = counted(classes, self._ignored)
        hits = (scores.topk(self._k).indices == classes[:, None]).any(-1)
        return torch.stack([(hits & counts).sum(), counts.sum()])

    def compute(self, sums: torch.Tensor) -> torch.Tensor:
        return sums[0] / sums[1]
