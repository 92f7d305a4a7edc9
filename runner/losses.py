"""The loss of a batch, as the mean over its samples."""

import torch
from torch import nn


class Auto:
    """Stands for the loss that fits the data's targets; build.py puts that loss in its place."""

    def __init__(self) -> None:
        pass

    def choose(self, targets: torch.Tensor, outputs: torch.Tensor) -> nn.Module:
        """Cross entropy for classes (log-probabilities: their likelihood), mean squared error for numbers.

        targets: (N,) integers or (N, num_outputs) numbers; outputs: the model's, (N, num_outputs).
        """
        if targets.is_floating_point():
            return nn.MSELoss()
        return nn.NLLLoss() if are_log_probabilities(outputs) else nn.CrossEntropyLoss()


def are_log_probabilities(outputs: torch.Tensor) -> bool:
    """Whether every row's exponentials sum to one. Logits do so only if they are log-probabilities already."""
    sums = outputs.double().exp().sum(-1)
    return torch.allclose(sums, torch.ones_like(sums), atol=1e-4)


def batch_loss(loss: nn.Module, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The mean over the samples; of no samples, a zero that still reaches the parameters, as DDP's buckets need."""
    if len(outputs) == 0:
        return outputs.float().sum() * 0.0
    return loss(outputs, targets)
