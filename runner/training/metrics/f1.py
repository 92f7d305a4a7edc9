"""The harmonic mean of precision and recall, of classes or of labels."""

from typing import Literal

import torch

from runner.training.metrics.class_counts import ClassCounts, by_class, mean_of_present
from runner.training.metrics.class_dim import ClassDimOption, IgnoreIndex, as_ignored


class F1:
    """2 TP / (2 TP + FP + FN).

    average: macro, the mean over the classes that occur, in targets or predictions; or micro, of the counts of all
    classes. per_class: that of each class as well, as f1/class_0. threshold: of labels, see ClassCounts.
    Source: van Rijsbergen, "Information Retrieval", 1979, chapter 7; averages as in scikit-learn's f1_score.
    """

    higher_is_better = True

    def __init__(
        self,
        average: Literal["macro", "micro"] = "macro",
        per_class: bool = False,
        threshold: float = 0.0,
        ignore_index: IgnoreIndex = None,
        class_dim: ClassDimOption = None,
    ):
        self._average, self._per_class = average, per_class
        self._counts = ClassCounts("f1", threshold, as_ignored(ignore_index), class_dim)

    def update(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """As ClassCounts.of -> (3, C)."""
        return self._counts.of(outputs, targets)

    def compute(self, sums: torch.Tensor) -> torch.Tensor | dict[str, torch.Tensor]:
        of_classes = _f1(sums)
        mean = _f1(sums.sum(1)) if self._average == "micro" else mean_of_present(of_classes, sums)
        return by_class(mean, of_classes, self._per_class, self._average)


def _f1(counts: torch.Tensor) -> torch.Tensor:
    found, false, missed = counts
    return 2 * found / (2 * found + false + missed).clamp(min=1)
