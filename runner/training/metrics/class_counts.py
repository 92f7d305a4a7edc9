"""Per class: how often it was found, taken for another one, and missed."""

import torch

from runner.training.metrics.class_dim import ClassDim, ClassDimOption, check_tensors, counted


class ClassCounts:
    """Counts of classes that exclude each other, or of labels that do not (binary, multi-label), by the shapes.

    threshold: of labels, the output above which one is predicted.
    """

    def __init__(self, name: str, threshold: float, ignore_index: int | None, class_dim: ClassDimOption):
        self._name, self._threshold, self._ignored = name, threshold, ignore_index
        self._classes = ClassDim(class_dim)

    def of(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """(3, C): true positives, false positives, false negatives.

        Classes: outputs (N, C), (N, C, ...) or (N, ..., C) and targets (N, ...) integers. Labels: outputs and targets
        (N) or (N, C, ...), 0 or 1; outputs (N, 1) also fit targets (N). Raises ValueError for other shapes.
        """
        check_tensors(self._name, outputs, targets)
        if outputs.shape == (*targets.shape, 1):
            outputs = outputs.squeeze(-1)
        if outputs.shape == targets.shape:
            return self._of_labels(outputs, targets)
        scores, classes = self._classes.last(self._name, outputs, targets)
        counts, num_classes = counted(classes, self._ignored), scores.shape[-1]
        predicted, classes = scores.argmax(-1)[counts], classes[counts]
        found = torch.bincount(classes[predicted == classes], minlength=num_classes)
        guessed, present = (torch.bincount(of, minlength=num_classes) for of in (predicted, classes))
        return torch.stack([found, guessed - found, present - found])

    def _of_labels(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        dims = [dim for dim in range(targets.dim()) if dim != 1]
        counts, wanted, predicted = counted(targets, self._ignored), targets > 0.5, outputs > self._threshold
        cells = (predicted & wanted, predicted & ~wanted, ~predicted & wanted)
        return torch.stack([(cell & counts).sum(dims).reshape(-1) for cell in cells])


def mean_of_present(values: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """The mean over the classes that were wanted or predicted at all; 0 where none was."""
    present = counts.sum(0) > 0
    return (values * present).sum() / present.sum().clamp(min=1)


def by_class(
    mean: torch.Tensor, values: torch.Tensor, per_class: bool, name: str
) -> torch.Tensor | dict[str, torch.Tensor]:
    """The mean, and on demand the values of all classes beside it."""
    if not per_class:
        return mean
    return {name: mean} | {f"class_{number}": value for number, value in enumerate(values)}
