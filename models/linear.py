"""One linear layer: linear regression under a squared error, softmax regression under cross entropy."""

import math
from collections.abc import Sequence

from torch import Tensor, nn

from .checks import Plan, check_sizes


class Linear(nn.Module):
    """A linear layer. Samples of any shape are flattened, (N, *sample_shape) -> (N, num_outputs).

    Raises ValueError if a size is below 1.
    """

    def __init__(self, sample_shape: Sequence[int], num_outputs: int) -> None:
        super().__init__()
        check_sizes(sample_shape, num_outputs)
        self.head = nn.Linear(math.prod(sample_shape), num_outputs)

    def forward(self, samples: Tensor) -> Tensor:
        return self.head(samples.flatten(1))  # (N, *sample_shape) -> (N, num_outputs)

    def stages(self) -> list[nn.Module]:
        return [nn.Sequential(nn.Flatten(), self.head)]

    def tensor_plan(self) -> Plan:
        return {"head": "rowwise"}
