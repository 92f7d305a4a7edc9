"""Parts of transformers: blocks of attention and a perceptron, learned positions, and their tensor plan."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .checks import Plan


class Block(nn.Module):
    """A pre-norm transformer block: attention, then a perceptron with one hidden layer, each with a residual.

    dropout: probability of dropping an output of attention or perceptron in training. is_causal: see Attention.
    """

    def __init__(self, dim: int, heads: int, hidden: int, is_causal: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.attention = Attention(dim, heads, is_causal)
        self.norm2 = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, hidden)
        self.gelu = nn.GELU()
        self.down = nn.Linear(hidden, dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, features: Tensor) -> Tensor:  # (N, L, dim) -> (N, L, dim)
        features = features + self.dropout(self.attention(self.norm1(features)))
        return features + self.dropout(self.down(self.gelu(self.up(self.norm2(features)))))


class Attention(nn.Module):
    """Multi-head attention. Each position attends to all positions, or with is_causal to itself and earlier ones.

    The number of heads follows from the number of features that the layers return: if tensor parallelism shards the
    layers, each rank computes some of the heads.
    """

    def __init__(self, dim: int, heads: int, is_causal: bool = False) -> None:
        super().__init__()
        self.head_dim, self.is_causal = dim // heads, is_causal
        self.query = nn.Linear(dim, dim)
        self.key = nn.Linear(dim, dim)
        self.value = nn.Linear(dim, dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, features: Tensor) -> Tensor:  # (N, L, dim) -> (N, L, dim)
        query, key, value = (
            layer(features).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)  # (N, heads, L, head_dim)
            for layer in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=self.is_causal)
        return self.proj(mixed.transpose(1, 2).flatten(2))


class Positions(nn.Module):
    """Adds a learned vector to each position of a sequence of at most `num_positions`."""

    def __init__(self, num_positions: int, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_positions, dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, features: Tensor) -> Tensor:  # (N, L, dim) -> (N, L, dim)
        """Raise ValueError if the sequence is longer than the learned positions."""
        if features.size(1) > len(self.weight):
            raise ValueError(
                f"a sequence of {features.size(1)} must have at most the {len(self.weight)} positions that were learned"
            )
        return features + self.weight[: features.size(1)]


def check_blocks(dim: int, depth: int, heads: int, mlp_ratio: float) -> None:
    """Raise ValueError unless all sizes, including that of the hidden layer, are at least 1 and heads divides dim."""
    for name, size in {"dim": dim, "depth": depth, "heads": heads}.items():
        if size < 1:
            raise ValueError(f"{name}={size} must be at least 1")
    if dim % heads:
        raise ValueError(f"heads={heads} must divide dim={dim}; try heads=1, or dim={dim // heads * heads + heads}")
    if not 1 <= dim * mlp_ratio < math.inf:
        raise ValueError(f"mlp_ratio={mlp_ratio} must give at least one hidden unit for dim={dim}; try 4.0")


def plan_blocks(depth: int) -> Plan:
    """Return the plan of `depth` blocks in a module's `blocks`.

    Each rank computes whole heads, so the number of ranks must divide the number of heads and the sizes of the layers.
    """
    plan: Plan = {}
    for index in range(depth):
        plan |= {f"blocks.{index}.attention.{name}": "colwise" for name in ("query", "key", "value")}
        plan |= {f"blocks.{index}.attention.proj": "rowwise"}
        plan |= {f"blocks.{index}.up": "colwise", f"blocks.{index}.down": "rowwise"}
    return plan
