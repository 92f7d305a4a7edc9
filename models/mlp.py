"""A multilayer perceptron of any depth."""

import math
from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor, nn

from models.checks import check_sizes


class MLP(nn.Module):
    """Linear, BatchNorm and Dropout if wanted, ReLU, for each size in `hidden`, and a linear head.

    Samples of any shape are flattened, (N, *sample_shape) -> (N, num_outputs).
    Raises ValueError where a size is below 1, `hidden` is empty or `dropout` is not a probability below 1.
    """

    def __init__(
        self,
        sample_shape: Sequence[int],
        num_outputs: int,
        hidden: Sequence[int] = (256, 128),
        batch_norm: bool = False,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        check_sizes(sample_shape, num_outputs)
        if not hidden or min(hidden) < 1:
            raise ValueError(f"hidden={list(hidden)} must be one or more sizes of at least 1; try [256, 128]")
        if not 0 <= dropout < 1:
            raise ValueError(f"dropout={dropout} must be at least 0 and below 1; try 0.1")
        layers: list[nn.Module] = []
        for num_inputs, size in pairwise([math.prod(sample_shape), *hidden]):
            layers.append(nn.Linear(num_inputs, size))
            if batch_norm:
                layers.append(nn.BatchNorm1d(size))
            layers.append(nn.ReLU())
            if dropout:
                layers.append(nn.Dropout(dropout))
        self.layers = nn.Sequential(*layers)
        self.head = nn.Linear(hidden[-1], num_outputs)

    def forward(self, samples: Tensor) -> Tensor:
        features = self.layers(samples.flatten(1))  # (N, *sample_shape) -> (N, hidden[-1])
        return self.head(features)  # (N, hidden[-1]) -> (N, num_outputs)
