"""Models as users write them, for what the models of this repository have not: `model=linear model._target_=...`."""

from collections.abc import Sequence
from math import prod

from torch import Tensor, nn


class Block(nn.Module):
    """A perceptron with one hidden layer, added to its input."""

    def __init__(self, width: int, dropout: float = 0.0, batch_norm: bool = False):
        super().__init__()
        self.norm = nn.BatchNorm1d(width) if batch_norm else nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.gelu = nn.GELU()
        self.dropout = nn.Dropout(dropout)
        self.down = nn.Linear(2 * width, width)

    def forward(self, features: Tensor) -> Tensor:
        return features + self.down(self.dropout(self.gelu(self.up(self.norm(features)))))


class Chain(nn.Module):
    """A linear layer, four blocks, a linear layer. (N, *sample_shape) -> (N, num_outputs)"""

    def __init__(self, sample_shape: Sequence[int], num_outputs: int, dropout: float = 0.0, batch_norm: bool = False):
        super().__init__()
        self.embed = nn.Linear(prod(sample_shape), 8)
        self.blocks = nn.ModuleList(Block(8, dropout, batch_norm) for _ in range(4))
        self.head = nn.Linear(8, num_outputs)

    def forward(self, inputs: Tensor) -> Tensor:
        features = self.embed(inputs.flatten(1))
        for block in self.blocks:
            features = block(features)
        return self.head(features)

    def stages(self) -> list[nn.Module]:
        return [nn.Sequential(nn.Flatten(), self.embed), *self.blocks, self.head]

    def tensor_plan(self) -> dict[str, str]:
        names = [f"blocks.{index}.{name}" for index in range(4) for name in ("up", "down")]
        return {name: "colwise" if name.endswith("up") else "rowwise" for name in names}
