"""Datasets that read whole batches, and one whose samples and targets are in memory."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import Dataset


class BatchDataset(Dataset[tuple[Tensor, Tensor]]):
    """A dataset whose `__getitems__` returns a batch (inputs, targets), of which a sample is one row."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        inputs, targets = self.__getitems__([index])
        return inputs[0], targets[0]

    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        raise NotImplementedError


class TensorData(BatchDataset):
    """Sample i consists of row i of `samples` and row i of `targets`. An index outside of [0, len) raises IndexError.

    Args:
        samples: (num_samples, *shape) float32, or (num_samples, C, H, W) uint8 images. Images stay uint8 in memory, a
            quarter of the bytes, and each batch is converted to float32 in [0, 1], with the values of ToTensor.
        targets: (num_samples,) int64 classes, or (num_samples, num_outputs) float32.
        image_size: (height, width) to which batches of images are resized; None keeps their size.
    """

    reads_ahead = True  # several batches at once, because a row does not depend on the others

    def __init__(self, samples: Tensor, targets: Tensor, image_size: Sequence[int] | None = None) -> None:
        assert len(samples) == len(targets), f"{len(samples)} samples, {len(targets)} targets"
        self.samples = samples
        self.targets = targets
        resized = image_size is not None and tuple(image_size) != tuple(samples.shape[2:])
        self.image_size = list(image_size) if image_size is not None and resized else None

    def __len__(self) -> int:
        return len(self.targets)

    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return a batch: (len(indices), *sample_shape) samples, and their targets."""
        rows = torch.from_numpy(np.asarray(indices, np.int64))  # as_tensor takes three times as long for a list
        samples = self.samples.index_select(0, rows)  # samples[rows] takes four times as long
        if samples.dtype == torch.uint8:
            samples = samples.to(torch.float32).div_(255)
        if self.image_size is not None:
            # (N, C, H, W) -> (N, C, *image_size); clamp_, because rounding may exceed 1 by one bit
            samples = F.interpolate(samples, self.image_size, mode="bilinear", antialias=True).clamp_(0, 1)
        return samples, self.targets.index_select(0, rows)
