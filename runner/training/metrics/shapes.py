"""The layout of outputs and targets in metrics: the dim of the classes, and the positions that count."""

from typing import Literal

import torch

from runner.input.batch import widen_integers
from runner.input.pytree import describe
from runner.objectives.losses import find_class_dim, fits

# The value `auto` means the option of the loss; see runner.training.components.
IgnoreIndex = int | Literal["auto"] | None
ClassDim = Literal[1, -1, "auto"] | None


class ClassMetric:
    """A metric of the class of each position, which is a sample, a token or a pixel.

    Positions of the class `ignore_index` do not count. The classes are in the dim `class_dim`, 1 or -1; None is
    resolved by the first batch, which is one sample of the training data.
    """

    def __init__(self, ignore_index: IgnoreIndex = None, class_dim: ClassDim = None):
        if ignore_index == "auto":
            raise ValueError("ignore_index=auto needs a loss that has an ignore_index; set a class, or null")
        if class_dim not in (1, -1, None):
            raise ValueError(f"class_dim={class_dim} must be 1, -1 or null without a loss that has a class_dim")
        self._ignored, self._class_dim = ignore_index, class_dim

    def positions(self, outputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return scores (positions, num_classes) and classes (positions) of the positions that count.

        Outputs are (N, C, ...) or (N, ..., C), and targets (N, ...) integers. Raises ValueError for other shapes.
        """
        check_tensors(outputs, targets)
        if self._class_dim is None:
            self._class_dim = find_class_dim(outputs, targets)
        if self._class_dim is None or targets.is_floating_point() or not fits(self._class_dim, outputs, targets):
            raise ValueError(
                "it needs scores (N, C), (N, C, ...) or (N, ..., C) for integer classes (N, ...), not "
                f"{list(outputs.shape)} for {targets.dtype} {list(targets.shape)}"
            )
        scores = outputs.movedim(self._class_dim, -1).flatten(0, -2)
        classes = widen_integers(targets).flatten()
        if self._ignored is None:
            return scores, classes
        counts = classes != self._ignored
        return scores[counts], classes[counts]

    def compute(self, sums: torch.Tensor) -> torch.Tensor | dict[str, torch.Tensor]:
        """Return the fraction of positions that satisfy the metric, given their number and that of all positions."""
        return sums[0] / sums[1]


def check_tensors(outputs: object, targets: object) -> None:
    """Raise ValueError if the outputs or the targets are not a tensor."""
    if not isinstance(outputs, torch.Tensor) or not isinstance(targets, torch.Tensor):
        raise ValueError(
            f"it needs one tensor of outputs and one of targets, not {describe((outputs, targets))}; write a custom "
            "metric that selects the tensors"
        )


def as_pairs(outputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return outputs and targets of one shape (N, ...) in float64; outputs (N, 1) also fit targets (N).

    Raises ValueError for other shapes.
    """
    check_tensors(outputs, targets)
    if outputs.shape == (*targets.shape, 1):
        outputs = outputs.squeeze(-1)
    if outputs.shape != targets.shape:
        raise ValueError(
            f"it compares numbers of one shape, not {list(outputs.shape)} with {targets.dtype} {list(targets.shape)}"
        )
    return outputs.double(), targets.double()
