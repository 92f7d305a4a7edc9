"""A multilayer perceptron of any depth."""

import math
from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor, nn

from .checks import Plan, check_dropout, check_sizes


class MLP(nn.Module):
    """A linear layer, optional BatchNorm and Dropout, and ReLU for each size in `hidden`, then a linear head.

    Samples of any shape are flattened, (N, *sample_shape) -> (N, num_outputs).
    Raises ValueError if a size is below 1, `hidden` is empty, or `dropout` is not in [0, 1).
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
        check_dropout(dropout)
        self.batch_norm = batch_norm
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

    def stages(self) -> list[nn.Module]:
        others = (nn.BatchNorm1d, nn.ReLU, nn.Dropout)  # a linear layer may have been replaced by one with an adapter
        starts = [index for index, layer in enumerate(self.layers) if not isinstance(layer, others)]
        groups = [list(self.layers[start:end]) for start, end in pairwise([*starts, len(self.layers)])]
        first, *later = groups
        return [nn.Sequential(nn.Flatten(), *first), *(nn.Sequential(*group) for group in later), self.head]

    def tensor_plan(self) -> Plan:
        """Return pairs of a colwise and a rowwise layer, which need one collective; an odd last layer is separate.

        A BatchNorm inside a pair would see a slice of the activations, but it has weights and statistics of all
        units. So with batch_norm no layers are paired. ReLU and Dropout are elementwise and may be inside a pair.
        """
        names = [name for name, layer in self.named_modules() if isinstance(layer, nn.Linear)]
        paired = 0 if self.batch_norm else len(names) - len(names) % 2
        return {name: "colwise" if i < paired and i % 2 == 0 else "rowwise" for i, name in enumerate(names)}
