"""What metrics of predicted numbers share."""

import torch

from runner.training.metrics.class_dim import check_tensors


def as_pairs(name: str, outputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs and targets of one shape (N, ...), in float64; outputs (N, 1) also fit targets (N).

    Raises ValueError for other shapes, and for classes.
    """
    check_tensors(name, outputs, targets)
    if outputs.shape == (*targets.shape, 1):
        outputs = outputs.squeeze(-1)
    if outputs.shape != targets.shape or not targets.is_floating_point():
        kind = "numbers" if targets.is_floating_point() else "integers"
        raise ValueError(
            f"{name} compares numbers of one shape, but the outputs are {list(outputs.shape)} and the targets {kind} "
            f"{list(targets.shape)}"
        )
    return outputs.double(), targets.double()
