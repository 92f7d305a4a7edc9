"""Checks of a dataset's options before it creates or reads anything, and of indices."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

FEW = 20  # different numbers that could be classes


def check_sizes(sample_shape: Sequence[int], num_outputs: int) -> None:
    """Raise ValueError unless samples have at least one dim and all sizes are at least 1."""
    if not sample_shape or min(sample_shape) < 1:
        raise ValueError(f"sample_shape={list(sample_shape)} must be one or more sizes of at least 1, such as [10]")
    if num_outputs < 1:
        raise ValueError(f"num_outputs={num_outputs} must be at least 1")


def check_counts(**counts: int) -> None:
    """Raise ValueError unless all numbers of samples, by the names of their options, are at least 1."""
    for name, count in counts.items():
        if count < 1:
            raise ValueError(f"{name}={count} must be at least 1; try 1024")


def check_images(sample_shape: Sequence[int], num_outputs: int, images: Sequence[int], num_classes: int) -> None:
    """Raise ValueError unless `images`, (C, H, W), can be resized to the samples, and the outputs are their classes."""
    check_sizes(sample_shape, num_outputs)
    if len(sample_shape) != 3 or sample_shape[0] != images[0]:
        raise ValueError(
            f"sample_shape={list(sample_shape)} must be [channels, height, width] with {images[0]} "
            f"channel{'s' if images[0] > 1 else ''}, as the images have; try {list(images)}"
        )
    if num_outputs != num_classes:
        raise ValueError(f"num_outputs={num_outputs} must be {num_classes}, the number of classes")


def check_rows(indices: Sequence[int], num_samples: int) -> Tensor:
    """Return the indices, (N,) int64. Raise IndexError, which ends iteration, if one is not in [0, num_samples)."""
    rows = torch.as_tensor(indices, dtype=torch.int64)
    if bool(((rows < 0) | (rows >= num_samples)).any()):
        raise IndexError(f"indices must be in 0 .. {num_samples - 1}")
    return rows


def could_be_classes(targets: np.ndarray) -> bool:
    """Return True if numbers are integers, and at most `FEW` different ones among the first 100,000."""
    values = np.unique(targets[:100_000])
    return len(values) <= FEW and bool((values == np.floor(values)).all())
