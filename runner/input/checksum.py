"""Checksums of samples: by them, two runs are compared whose data may have changed in between.

The checksum of a step is the sum of those of its samples. So it does not depend on how ranks, micro-batches and modes
share the step.
"""

import math
import zlib
from typing import Any

import numpy as np
import torch

from runner.input.pytree import leaves, tensors

NUM_STEPS = 100  # of the first epoch, whose samples are hashed; a megabyte takes 0.3 ms
Shapes = list[tuple[int, ...]]


def sample_checksum(sample: Any) -> float:
    """Return the CRC-32 of the tensors, arrays, numbers and texts of a sample, NaN if one of them has no bytes.

    Objects of other types are ignored.
    """
    checksum = 0
    try:
        for leaf in leaves(sample):
            checksum = zlib.crc32(_bytes_of(leaf), checksum)
    except (RuntimeError, TypeError, ValueError):  # for example a sparse tensor
        return math.nan
    return float(checksum)


def row_checksums(batch: Any, num_samples: int, expected: Shapes) -> list[float]:
    """Return the CRC-32 of each sample in a batch, NaN unless its tensors have a row of the expected shape per sample.

    expected: of a batch of a single sample. The rows of a batch that is padded depend on the other samples.
    """
    checksums = [0] * num_samples
    found = tensors(batch)
    if row_shapes(batch) != expected or any(len(tensor) != num_samples for tensor in found):
        return [math.nan] * num_samples
    for tensor in found:
        for number, row in enumerate(tensor.detach().cpu().contiguous().reshape(num_samples, -1)):
            checksums[number] = zlib.crc32(_bytes_of(row), checksums[number])
    return [*map(float, checksums)]


def row_shapes(batch: Any) -> Shapes:
    """Return the shapes of the rows of a batch's tensors."""
    return [tuple(tensor.shape[1:]) if tensor.dim() else () for tensor in tensors(batch)]


def _bytes_of(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    if isinstance(leaf, (np.ndarray, np.generic)):
        return np.ascontiguousarray(leaf).tobytes()
    return repr(leaf).encode() if isinstance(leaf, (bool, int, float, complex, str, bytes)) else b""
