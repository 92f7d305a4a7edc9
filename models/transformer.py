"""A small pre-norm transformer over the patches of an image."""

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from .blocks import Block, Positions, check_blocks, plan_blocks
from .checks import Plan, check_images


class Transformer(nn.Module):
    """Patches, learned positions, `depth` blocks, the mean over the patches, a linear head.

    (N, C, H, W) -> (N, num_outputs). Raises ValueError if the samples are not images, `patch_size` does not divide
    their sizes, `heads` does not divide `dim`, or a size is below 1.
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
        if patch_size < 1:
            raise ValueError(f"patch_size={patch_size} must be at least 1")
        num_channels, height, width = sample_shape
        if height % patch_size or width % patch_size:
            sizes = [size for size in range(1, min(height, width) + 1) if height % size == width % size == 0]
            raise ValueError(
                f"patch_size={patch_size} must divide the height and width {height} x {width} of the samples; "
                f"try {min(sizes, key=lambda size: abs(size - patch_size))}"
            )
        check_blocks(dim, depth, heads, mlp_ratio)
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
        return plan_blocks(len(self.blocks))


class Patches(nn.Module):
    """Splits images into square patches, row by row, and flattens each patch."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def forward(self, images: Tensor) -> Tensor:  # (N, C, H, W) -> (N, L, C * size * size)
        return F.unfold(images, self.size, stride=self.size).transpose(1, 2)


class Mean(nn.Module):
    """Averages over positions."""

    def forward(self, features: Tensor) -> Tensor:  # (N, L, dim) -> (N, dim)
        return features.mean(1)
