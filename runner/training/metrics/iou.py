"""How well predicted regions cover the true ones."""

import torch

from runner.training.metrics.class_counts import ClassCounts, by_class, mean_of_present
from runner.training.metrics.class_dim import ClassDimOption, IgnoreIndex, as_ignored


class IoU:
    """Intersection over union, TP / (TP + FP + FN): the mean over the classes that occur, in targets or predictions.

    per_class: that of each class as well, as iou/class_0. threshold: of labels, see ClassCounts.
    Source: Everingham et al., "The PASCAL Visual Object Classes Challenge", 2010, section 4.4 (segmentation accuracy).
    """

    higher_is_better = True

    def __init__(
        self,
        per_class: bool = False,
        threshold: float = 0.0,
        ignore_index: IgnoreIndex = None,
        class_dim: ClassDimOption = None,
    ):
        self._per_class = per_class
        self._counts = ClassCounts("iou", threshold, as_ignored(ignore_index), class_dim)

    def update(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """As ClassCounts.of -> (3, C)."""
        return self._counts.of(outputs, targets)

    def compute(self, sums: torch.Tensor) -> torch.Tensor | dict[str, torch.Tensor]:
        found, false, missed = sums
        of_classes = found / (found + false + missed).clamp(min=1)
        return by_class(mean_of_present(of_classes, sums), of_classes, self._per_class, "mean")
