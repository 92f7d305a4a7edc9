"""Which dim of the outputs holds the classes, and which positions count."""

from typing import Literal

import torch

# Options of which auto is the loss's; see runner.training.build_metrics.
IgnoreIndex = int | Literal["auto"] | None
ClassDimOption = Literal[1, -1, "auto"] | None


class ClassDim:
    """1 or -1; None is found in the first batch, which is one sample of the training data, and then kept."""

    def __init__(self, dim: ClassDimOption) -> None:
        if dim not in (1, -1, None):
            raise ValueError(f"class_dim={dim} must be 1, -1 or null where there is no loss to take it from")
        self._dim = dim

    def last(self, name: str, outputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Scores (positions, num_classes) and classes (positions) of outputs (N, C, ...) or (N, ..., C).

        targets: (N, ...) integers. Raises ValueError where the shapes do not fit.
        """
        check_tensors(name, outputs, targets)
        if self._dim is None:
            self._dim = find_class_dim(outputs, targets)
        if self._dim is None or targets.is_floating_point() or not fits(self._dim, outputs, targets):
            kind = "numbers" if targets.is_floating_point() else "integers"
            raise ValueError(
                f"{name} needs scores (N, C), (N, C, ...) or (N, ..., C) for integer classes (N, ...), but the outputs "
                f"are {list(outputs.shape)} and the targets {kind} {list(targets.shape)}"
            )
        return outputs.movedim(self._dim, -1).flatten(0, -2), targets.flatten()


def find_class_dim(outputs: torch.Tensor, targets: torch.Tensor) -> Literal[1, -1] | None:
    """1 or -1, without which the outputs have the shape of the targets; 1, as in torch's losses, where both do."""
    if fits(1, outputs, targets):
        return 1
    return -1 if fits(-1, outputs, targets) else None


def fits(dim: Literal[1, -1], outputs: torch.Tensor, targets: torch.Tensor) -> bool:
    """Whether the outputs have the shape of the targets but for this dim."""
    if outputs.dim() != targets.dim() + 1:
        return False
    shape = list(outputs.shape)
    del shape[dim]
    return shape == list(targets.shape)


def check_tensors(name: str, outputs: object, targets: object) -> None:
    """Raises ValueError where either is no tensor."""
    for what, value in (("outputs", outputs), ("targets", targets)):
        if not isinstance(value, torch.Tensor):
            raise ValueError(
                f"{name} needs one tensor of outputs and one of targets, but the {what} are a {type(value).__name__}; "
                "write a metric of your own that takes from them what it needs"
            )


def as_ignored(ignore_index: IgnoreIndex) -> int | None:
    """The option's value once the loss is known. Raises ValueError for auto, which only a configuration can mean."""
    if ignore_index == "auto":
        raise ValueError("ignore_index=auto must be a class or null where there is no loss to take it from")
    return ignore_index


def counted(targets: torch.Tensor, ignore_index: int | None) -> torch.Tensor:
    """Which of the positions count, bool."""
    return torch.ones_like(targets, dtype=torch.bool) if ignore_index is None else targets != ignore_index
