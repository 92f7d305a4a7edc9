"""The 8 x 8 digits that scikit-learn carries: real images that need no download."""

from collections.abc import Sequence

import torch
from sklearn.datasets import load_digits
from torch.nn import functional as F

from data.checks import check_images
from data.tensors import TensorData

NUM_TRAIN = 1437  # 80 % of 1,797, which leaves 360 for validation


class Digits(TensorData):
    """1,797 handwritten digits scaled to (1, H, W) float32 in [0, 1], and their classes; a fixed split.

    Raises ValueError unless the samples have one channel and there are 10 outputs.
    Source: https://archive.ics.uci.edu/dataset/80 (the test half, which is what scikit-learn carries)
    """

    def __init__(self, train: bool, sample_shape: Sequence[int], num_outputs: int) -> None:
        check_images(sample_shape, num_outputs, images=(1, 28, 28), num_classes=10)
        digits = load_digits()
        # A generator of its own: the split is the same whatever the seed of the run.
        order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
        rows = order[:NUM_TRAIN] if train else order[NUM_TRAIN:]
        # Scaled in float64 and rounded once, so that no processor's order of operations shows in the values.
        images = torch.from_numpy(digits.images).to(torch.float64)[rows, None] / 16  # (N, 1, 8, 8), 16 gray levels
        images = F.interpolate(images, list(sample_shape[1:]), mode="bilinear", align_corners=False)  # (N, 1, H, W)
        super().__init__(images.to(torch.float32), torch.from_numpy(digits.target).to(torch.int64)[rows])
