"""A small pre-norm transformer over the patches of an image."""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.checks import Plan, check_images


class Transformer(nn.Module):
    """Patches, learned positions, `depth` blocks, the mean over the patches, a linear head.

    (N, C, H, W) -> (N, num_outputs). Raises ValueError where the samples are not images that patches of `patch_size`
    tile, where `heads` does not divide `dim`, and where a size is below 1.
    Sources: Dosovitskiy et al., "An Image is Worth 16x16 Words", 2020; mean pooling and no class token as in Beyer,
    Zhai, Kolesnikov, "Better plain ViT baselines for ImageNet-1k", 2022.
    """

    def __init__(
        self,
        sample_shape: Sequence[int],
        num_outputs: int,
        patch_size: int = 4,
        dim: int = 64,
        depth: int = 4,
        heads: int = 4,
        mlp_ratio: float = 4.0,
    ) -> None:
        super().__init__()
        check_images("transformer", sample_shape, num_outputs)
        for name, size in {"patch_size": patch_size, "dim": dim, "depth": depth, "heads": heads}.items():
            if size < 1:
                raise ValueError(f"{name}={size} must be at least 1")
        num_channels, height, width = sample_shape
        if height % patch_size or width % patch_size:
            sizes = [size for size in range(1, min(height, width) + 1) if height % size == width % size == 0]
            raise ValueError(
                f"patch_size={patch_size} must divide the height and width {height} x {width} of the samples; "
                f"try {min(sizes, key=lambda size: abs(size - patch_size))}"
            )
        if dim % heads:
            raise ValueError(f"heads={heads} must divide dim={dim}; try heads=1, or dim={dim // heads * heads + heads}")
        if not 1 <= dim * mlp_ratio < math.inf:
            raise ValueError(f"mlp_ratio={mlp_ratio} must leave a unit of dim={dim}; try 4.0")
        self.patches = Patches(patch_size)
        self.embed = nn.Linear(num_channels * patch_size**2, dim)
        self.positions = Positions((height // patch_size) * (width // patch_size), dim)
        self.blocks = nn.ModuleList(Block(dim, heads, int(dim * mlp_ratio)) for _ in range(depth))
        self.norm = nn.LayerNorm(dim)
        self.pool = Mean()
        self.head = nn.Linear(dim, num_outputs)

    def forward(self, images: Tensor) -> Tensor:
        features = self.positions(self.embed(self.patches(images)))  # (N, C, H, W) -> (N, L, dim)
        for block in self.blocks:
            features = block(features)
        return self.head(self.pool(self.norm(features)))  # (N, L, dim) -> (N, num_outputs)

    def stages(self) -> list[nn.Module]:
        return [
            nn.Sequential(self.patches, self.embed, self.positions),
            *self.blocks,
            nn.Sequential(self.norm, self.pool, self.head),
        ]

    def tensor_plan(self) -> Plan:
        """Whole heads to each rank: the ranks must divide `heads`, beside the sizes of the layers."""
        plan: Plan = {}
        for index in range(len(self.blocks)):
            plan |= {f"blocks.{index}.attention.{name}": "colwise" for name in ("query", "key", "value")}
            plan |= {f"blocks.{index}.attention.proj": "rowwise"}
            plan |= {f"blocks.{index}.up": "colwise", f"blocks.{index}.down": "rowwise"}
        return plan


class Block(nn.Module):
    """Attention, then a perceptron with one hidden layer, each on normalised features and added to them."""

    def __init__(self, dim: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.attention = Attention(dim, heads)
        self.norm2 = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, hidden)
        self.gelu = nn.GELU()
        self.down = nn.Linear(hidden, dim)

    def forward(self, features: Tensor) -> Tensor:  # (N, L, dim) -> (N, L, dim)
        features = features + self.attention(self.norm1(features))
        return features + self.down(self.gelu(self.up(self.norm2(features))))


class Attention(nn.Module):
    """Every patch looks at every other one.

    The number of heads is that of the features which the layers give: where these are cut over ranks, each rank has
    some of the heads.
    """

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.head_dim = dim // heads
        self.query = nn.Linear(dim, dim)
        self.key = nn.Linear(dim, dim)
        self.value = nn.Linear(dim, dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, features: Tensor) -> Tensor:  # (N, L, dim) -> (N, L, dim)
        query, key, value = (
            layer(features).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)  # (N, heads, L, head_dim)
            for layer in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(query, key, value)
        return self.proj(mixed.transpose(1, 2).flatten(2))


class Patches(nn.Module):
    """An image cut into squares, row by row, each flattened."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def forward(self, images: Tensor) -> Tensor:  # (N, C, H, W) -> (N, L, C * size * size)
        return F.unfold(images, self.size, stride=self.size).transpose(1, 2)


class Positions(nn.Module):
    """A learned vector added to each place."""

    def __init__(self, num_places: int, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_places, dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, features: Tensor) -> Tensor:  # (N, L, dim) -> (N, L, dim)
        return features + self.weight


class Mean(nn.Module):
    """The mean over the places."""

    def forward(self, features: Tensor) -> Tensor:  # (N, L, dim) -> (N, dim)
        return features.mean(1)
