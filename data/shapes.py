"""A segmentation dataset that needs no memory: discs and squares on noise, computed from the sample's number."""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from .checks import check_counts, check_rows, check_sizes
from .hashing import MASK, hash_numbers
from .tensors import BatchDataset

BACKGROUND, DISC, SQUARE = range(3)
MAX_SHAPES = 4
FACTS = 8  # numbers per shape: whether it exists, its class, center, size, and up to 3 color channels
SIZES = (0.08, 0.22)  # smallest and largest half width of a shape, relative to the shorter side of the image


class Shapes(BatchDataset):
    """Images of 1 to 4 filled shapes on noise, (C, H, W) float32, and the class of each pixel, (H, W) int64.

    Classes are 0 for background, 1 for discs and 2 for squares. A shape covers the shapes before it. Colors are uniform
    on [0.5, 1); noise, uniform on [0, noise), is added to the whole image. Training samples are numbered from 0,
    followed by validation and test samples. An index outside of [0, len) raises IndexError. Raises ValueError if a
    count is below 1, there are not 1 or 3 channels, images are smaller than 8 x 8, there are not 3 outputs, noise is
    not in [0, 10], or there are more than 2^32 samples.
    """

    def __init__(
        self,
        split: Literal["train", "val", "test"],
        sample_shape: Sequence[int],
        num_outputs: int,
        num_train: int = 2048,
        num_val: int = 256,
        num_test: int = 256,
        noise: float = 0.5,
        seed: int = 0,
    ) -> None:
        check_sizes(sample_shape, num_outputs)
        check_counts(num_train=num_train, num_val=num_val, num_test=num_test)
        if len(sample_shape) != 3 or sample_shape[0] not in (1, 3) or min(sample_shape[1:]) < 8:
            raise ValueError(
                f"sample_shape={list(sample_shape)} must be [channels, height, width] with 1 or 3 channels and at "
                "least 8 x 8 pixels; try [1, 64, 64]"
            )
        if num_outputs != 3:
            raise ValueError(f"num_outputs={num_outputs} must be 3, for background, disc and square")
        if not 0 <= noise <= 10:
            raise ValueError(f"noise={noise} must be at least 0 and at most 10; try 0.5")
        if num_train + num_val + num_test > MASK + 1:
            raise ValueError(
                f"num_train={num_train} must leave at most 2^32 samples together with num_val and num_test; "
                f"try {MASK + 1 - num_val - num_test}"
            )
        counts = {"train": num_train, "val": num_val, "test": num_test}
        self.start = {"train": 0, "val": num_train, "test": num_train + num_val}[split]
        self.num_samples = counts[split]
        self.channels, self.height, self.width = sample_shape
        self.noise = noise
        num_keys = MAX_SHAPES * FACTS + self.channels * self.height * self.width
        self.keys = hash_numbers(torch.arange(1, num_keys + 1) ^ hash_numbers(torch.tensor(seed & MASK)))

    def __len__(self) -> int:
        return self.num_samples

    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return a batch: (len(indices), C, H, W) images and (len(indices), H, W) classes."""
        rows = check_rows(indices, self.num_samples)
        bits = hash_numbers(hash_numbers(rows + self.start)[:, None] ^ self.keys)  # (N,) -> (N, keys)
        # A float32 represents 24 bits exactly, so the values are the same on every machine.
        uniform = (bits >> 8).to(torch.float32).div_(2**24)
        facts = uniform[:, : MAX_SHAPES * FACTS].reshape(len(rows), MAX_SHAPES, FACTS, 1, 1)
        images = (
            uniform[:, MAX_SHAPES * FACTS :].reshape(len(rows), self.channels, self.height, self.width) * self.noise
        )
        targets = torch.zeros(len(rows), self.height, self.width, dtype=torch.int64)
        colors = torch.zeros_like(images)
        side = min(self.height, self.width)
        ys = torch.arange(self.height, dtype=torch.float32)[:, None] + 0.5  # (H, 1), the centers of the pixels
        xs = torch.arange(self.width, dtype=torch.float32) + 0.5  # (W,)
        for number in range(MAX_SHAPES):
            exists, kind, y, x, size = facts[:, number, :5].unbind(1)  # (N, 1, 1) each
            half = (SIZES[0] + (SIZES[1] - SIZES[0]) * size) * side
            down, right = (ys - y * self.height).abs(), (xs - x * self.width).abs()  # (N, H, 1), (N, 1, W)
            disc = kind < 0.5
            covered = torch.where(disc, down**2 + right**2 <= half**2, (down <= half) & (right <= half))  # (N, H, W)
            if number:  # the first shape always exists
                covered &= exists < 0.5
            targets = torch.where(covered, torch.where(disc, DISC, SQUARE), targets)
            color = 0.5 + facts[:, number, 5 : 5 + self.channels] / 2  # (N, C, 1, 1)
            colors = torch.where(covered[:, None], color, colors)
        return images + colors, targets
