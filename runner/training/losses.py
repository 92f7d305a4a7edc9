"""The loss of a batch with its weight, and the loss that fits the data."""

from typing import NamedTuple

import torch
from torch import nn


class Auto:
    """Stands for the loss that fits the data's targets; runner.training.build puts that loss in its place."""

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


class WeightedLoss(NamedTuple):
    """A mean loss and its weight: how many samples it is the mean of."""

    mean: torch.Tensor  # ()
    weight: int

    def share(self, total_weight: int) -> torch.Tensor:
        """Its part of the mean over so much weight: such parts add up to that mean, however unevenly they were cut."""
        return self.mean * (self.weight / total_weight)

    @property
    def sum(self) -> torch.Tensor:
        """Over the samples, in float64."""
        return self.mean.double() * self.weight


def weighted_loss(loss: nn.Module, outputs: torch.Tensor, targets: torch.Tensor) -> WeightedLoss:
    """The loss of a batch; of no samples, a zero that still reaches the parameters, as DDP's buckets need."""
    if len(outputs) == 0:
        return WeightedLoss(outputs.float().sum() * 0.0, 0)
    return WeightedLoss(loss(outputs, targets), len(outputs))
