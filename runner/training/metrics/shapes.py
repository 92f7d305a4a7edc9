"""How metrics read outputs and targets: the dim of the classes, and the positions that count."""

from typing import Literal

import torch

from runner.objectives.losses import find_class_dim, fits

# The value auto stands for the loss's option; see runner.training.components.
IgnoreIndex = int | Literal["auto"] | None
ClassDimOption = Literal[1, -1, "auto"] | None


class ClassDim:
    """The dim of the classes: 1 or -1. None is resolved by the first batch: one sample of the training data."""

    def __init__(self, dim: ClassDimOption) -> None:
        if dim not in (1, -1, None):
            raise ValueError(f"class_dim={dim} must be 1, -1 or null without a loss that has a class_dim")
        self._dim = dim

    def flatten(self, name: str, outputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return scores (positions, num_classes) and classes (positions).

        Outputs are (N, C, ...) or (N, ..., C), and targets (N, ...) integers. Raises ValueError for other shapes.
        """
        check_tensors(name, outputs, targets)
        if self._dim is None:
            self._dim = find_class_dim(outputs, targets)
        if self._dim is None or targets.is_floating_point() or not fits(self._dim, outputs, targets):
            raise ValueError(
                f"{name} needs scores (N, C), (N, C, ...) or (N, ..., C) for integer classes (N, ...), but the outputs "
                f"are {list(outputs.shape)} and the targets {_kind(targets)} {list(targets.shape)}"
            )
        return outputs.movedim(self._dim, -1).flatten(0, -2), targets.flatten()


def check_tensors(name: str, outputs: object, targets: object) -> None:
    """Raise ValueError if the outputs or the targets are not a tensor."""
    for what, value in (("outputs", outputs), ("targets", targets)):
        if not isinstance(value, torch.Tensor):
            raise ValueError(
                f"{name} needs one tensor of outputs and one of targets, but the {what} are a {type(value).__name__}; "
                "write a custom metric that selects the tensors"
            )


def resolve_ignore_index(ignore_index: IgnoreIndex) -> int | None:
    """Return the option's value. Raise ValueError for auto, which the configuration must have replaced."""
    if ignore_index == "auto":
        raise ValueError("ignore_index=auto must be a class or null without a loss that has an ignore_index")
    return ignore_index


def counted(targets: torch.Tensor, ignore_index: int | None) -> torch.Tensor:
    """Return the mask of the positions that count, bool."""
    return torch.ones_like(targets, dtype=torch.bool) if ignore_index is None else targets != ignore_index


def as_pairs(name: str, outputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return real outputs and targets of one shape (N, ...) in float64; outputs (N, 1) also fit targets (N).

    Raises ValueError for other shapes and for integer targets.
    """
    check_tensors(name, outputs, targets)
    if outputs.shape == (*targets.shape, 1):
        outputs = outputs.squeeze(-1)
    if outputs.shape != targets.shape or not targets.is_floating_point():
        raise ValueError(
            f"{name} compares numbers of one shape, but the outputs are {list(outputs.shape)} and the targets "
            f"{_kind(targets)} {list(targets.shape)}"
        )
    return outputs.double(), targets.double()


def _kind(targets: torch.Tensor) -> str:
    return "numbers" if targets.is_floating_point() else "integers"
