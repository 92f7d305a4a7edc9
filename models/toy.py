"""The toy of the distributed-training tutorials: two linear layers with a ReLU in between."""

import math
from collections.abc import Sequence

from torch import Tensor, nn

from .checks import Plan, check_sizes


class Toy(nn.Module):
    """Layers of 10-10-5 units on the toy data. Samples are flattened, (N, *sample_shape) -> (N, num_outputs).

    Raises ValueError if a size is below 1.
    Source: https://docs.pytorch.org/tutorials/intermediate/ddp_tutorial.html
    """

    def __init__(self, sample_shape: Sequence[int], num_outputs: int, hidden: int = 10) -> None:
        super().__init__()
        check_sizes(sample_shape, num_outputs)
        if hidden < 1:
            raise ValueError(f"hidden={hidden} must be at least 1; try 10")
        self.hidden = nn.Linear(math.prod(sample_shape), hidden)
        self.relu = nn.ReLU()
        self.head = nn.Linear(hidden, num_outputs)

    def forward(self, samples: Tensor) -> Tensor:
        features = self.relu(self.hidden(samples.flatten(1)))  # (N, *sample_shape) -> (N, hidden)
        return self.head(features)  # (N, hidden) -> (N, num_outputs)

    def stages(self) -> list[nn.Module]:
        return [nn.Sequential(nn.Flatten(), self.hidden, self.relu), self.head]

    def tensor_plan(self) -> Plan:
        return {"hidden": "colwise", "head": "rowwise"}
