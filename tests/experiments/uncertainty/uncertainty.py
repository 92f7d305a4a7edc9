"""A loss with a trainable parameter."""

import torch
from torch import Tensor, nn


class LearnedScale(nn.Module):
    """The squared error of each output, in units that are learned for each output.

    Kendall, Gal, Cipolla, "Multi-Task Learning Using Uncertainty to Weigh Losses", 2018, section 3.2.
    """

    def __init__(self, num_outputs: int):
        super().__init__()
        self.log_variance = nn.Parameter(torch.zeros(num_outputs))

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:  # (N, K), (N, K) -> ()
        return ((outputs - targets) ** 2 / self.log_variance.exp() + self.log_variance).sum(1).mean() / 2


class LearnedScaleOfSome(LearnedScale):
    """Only of samples whose first target is above a threshold; a micro-batch may contain none of them."""

    def weight_of(self, targets: Tensor) -> Tensor:
        return (targets[:, 0] > 0.5).sum()

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        counts = targets[:, 0] > 0.5
        return super().forward(outputs[counts], targets[counts])
