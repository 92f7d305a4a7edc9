"""A U-Net, which computes outputs for each pixel of an image."""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from .checks import check_images


class UNet(nn.Module):
    """`depth` poolings and as many upsamplings. Each upsampling is concatenated with the features before its pooling.

    (N, C, H, W) -> (N, num_outputs, H, W). A block is two 3 x 3 convolutions, each with BatchNorm and ReLU; it has
    `width` channels at full size, and twice as many after each pooling. Unlike the original, convolutions are padded,
    so that outputs have the size of the images. The model has no stages, because each would return several tensors.
    Raises ValueError if samples are not images, 2**depth does not divide their sizes, or a size is below 1.
    Source: Ronneberger, Fischer, Brox, "U-Net: Convolutional Networks for Biomedical Image Segmentation", 2015.
    """

    def __init__(self, sample_shape: Sequence[int], num_outputs: int, width: int = 16, depth: int = 2) -> None:
        super().__init__()
        check_images("unet", sample_shape, num_outputs)
        for name, size in {"width": width, "depth": depth}.items():
            if size < 1:
                raise ValueError(f"{name}={size} must be at least 1")
        _check_halvings(depth, *sample_shape[1:])
        widths = [width * 2**level for level in range(depth + 1)]
        self.down = nn.ModuleList(_block(*sizes) for sizes in pairwise([sample_shape[0], *widths[:-1]]))
        self.halve = nn.MaxPool2d(2)
        self.bottom = _block(*widths[-2:])
        from_bottom = list(pairwise(reversed(widths)))
        self.enlarge = nn.ModuleList(nn.ConvTranspose2d(*sizes, kernel_size=2, stride=2) for sizes in from_bottom)
        self.up = nn.ModuleList(_block(*sizes) for sizes in from_bottom)
        self.head = nn.Conv2d(width, num_outputs, kernel_size=1)

    def forward(self, images: Tensor) -> Tensor:
        features, halved = images, []
        for block in self.down:
            features = block(features)  # (N, C, H, W) -> (N, width, H, W), then (N, 2 * width, H / 2, W / 2), ...
            halved.append(features)
            features = self.halve(features)
        features = self.bottom(features)  # -> (N, width * 2**depth, H / 2**depth, W / 2**depth)
        for enlarge, block in zip(self.enlarge, self.up, strict=True):
            features = block(torch.cat([halved.pop(), enlarge(features)], dim=1))
        return self.head(features)  # (N, width, H, W) -> (N, num_outputs, H, W)


def _block(num_inputs: int, num_outputs: int) -> nn.Sequential:
    # (N, num_inputs, H, W) -> (N, num_outputs, H, W); the convolutions have no biases, because BatchNorm adds one
    return nn.Sequential(
        nn.Conv2d(num_inputs, num_outputs, kernel_size=3, padding=1, bias=False),
        nn.BatchNorm2d(num_outputs),
        nn.ReLU(),
        nn.Conv2d(num_outputs, num_outputs, kernel_size=3, padding=1, bias=False),
        nn.BatchNorm2d(num_outputs),
        nn.ReLU(),
    )


def _check_halvings(depth: int, height: int, width: int) -> None:
    """Raise ValueError unless both sizes are divisible by 2**depth."""
    if height % 2**depth == width % 2**depth == 0:
        return
    possible = max(d for d in range(depth) if height % 2**d == width % 2**d == 0)
    nearest = [max(1, round(size / 2**depth)) * 2**depth for size in (height, width)]
    sizes = f"images of {nearest[0]} x {nearest[1]}"
    raise ValueError(
        f"depth={depth} halves the images {depth} times, but their height and width {height} x {width} are not both "
        f"divisible by {2**depth}; try {f'depth={possible}, or {sizes}' if possible else sizes}"
    )
