"""Metrics of true positives, false positives and false negatives per class: F1 and intersection over union."""

from typing import Literal

import torch

from runner.input.batch import widen_integers
from runner.training.metrics.shapes import ClassDim, ClassMetric, IgnoreIndex, check_tensors


class _ClassCounts(ClassMetric):
    """Sums of true positives, false positives and false negatives, from which a metric computes a value per class.

    The shapes decide whether classes exclude each other, or are independent labels (binary, multi-label). A label is
    predicted if its output is above `threshold`. With `per_class`, the value of each class is returned too.
    """

    higher_is_better = True
    _average = "mean"  # the name of the mean over the classes
    _weight_of_hits = 1

    def __init__(
        self,
        per_class: bool = False,
        threshold: float = 0.0,
        ignore_index: IgnoreIndex = None,
        class_dim: ClassDim = None,
    ):
        super().__init__(ignore_index, class_dim)
        self._per_class, self._threshold = per_class, threshold

    def update(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return true positives, false positives and false negatives, (3, C).

        Classes: outputs (N, C), (N, C, ...) or (N, ..., C) and targets (N, ...) integers. Labels: outputs and targets
        (N) or (N, C, ...), 0 or 1; outputs (N, 1) also fit targets (N). Raises ValueError for other shapes.
        """
        check_tensors(outputs, targets)
        if outputs.shape == (*targets.shape, 1):
            outputs = outputs.squeeze(-1)
        if outputs.shape == targets.shape:
            return self._of_labels(outputs, targets)
        scores, classes = self.positions(outputs, targets)
        predicted, num_classes = scores.argmax(-1), scores.shape[-1]
        true_positives, predictions, occurrences = (
            torch.bincount(of, minlength=num_classes) for of in (classes[predicted == classes], predicted, classes)
        )
        return torch.stack([true_positives, predictions - true_positives, occurrences - true_positives])

    def _of_labels(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        dims, targets = [dim for dim in range(targets.dim()) if dim != 1], widen_integers(targets)
        wanted, predicted = targets > 0.5, outputs > self._threshold
        counts = torch.ones_like(wanted) if self._ignored is None else targets != self._ignored
        cells = (predicted & wanted, predicted & ~wanted, ~predicted & wanted)
        return torch.stack([(cell & counts).sum(dims).reshape(-1) for cell in cells])

    def compute(self, sums: torch.Tensor) -> torch.Tensor | dict[str, torch.Tensor]:
        """Return the mean, or with `per_class` a mapping with the mean and the value of each class.

        Classes that occur neither in targets nor in predictions do not count; without any, the mean is 0.
        """
        values, present = self._ratio(sums), sums.sum(0) > 0
        mean = (values * present).sum() / present.sum().clamp(min=1)
        if self._average == "micro":
            mean = self._ratio(sums.sum(1))
        if not self._per_class:
            return mean
        return {self._average: mean} | {f"class_{number}": value for number, value in enumerate(values)}

    def _ratio(self, counts: torch.Tensor) -> torch.Tensor:
        true_positives, false_positives, false_negatives = counts
        hits: torch.Tensor = self._weight_of_hits * true_positives
        return hits.div((hits + false_positives + false_negatives).clamp(min=1))


class IoU(_ClassCounts):
    """Intersection over union, TP / (TP + FP + FN): the mean over the classes that occur in targets or predictions.

    Source: Everingham et al., "The PASCAL Visual Object Classes Challenge", 2010, section 4.4 (segmentation accuracy).
    """


class F1(_ClassCounts):
    """2 TP / (2 TP + FP + FN), the harmonic mean of precision and recall.

    With `average=micro`, the counts of all classes are added up; `macro` is the mean over the classes.

    Source: van Rijsbergen, "Information Retrieval", 1979, chapter 7; averages as in scikit-learn's f1_score.
    """

    _weight_of_hits = 2

    def __init__(
        self,
        average: Literal["macro", "micro"] = "macro",
        per_class: bool = False,
        threshold: float = 0.0,
        ignore_index: IgnoreIndex = None,
        class_dim: ClassDim = None,
    ):
        super().__init__(per_class, threshold, ignore_index, class_dim)
        self._average = average
