"""The 8 x 8 digits that scikit-learn contains: real images without a download."""

from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional as F

from .checks import check_images
from .tensors import TensorData

NUM_TRAIN = 1437  # 80% of 1,797, which leaves 360 for validation


class Digits(TensorData):
    """1,797 handwritten digits scaled to (1, H, W) float32 in [0, 1], and their classes; a fixed split.

    Raises ValueError unless the samples have one channel and there are 10 outputs.
    Source: https://archive.ics.uci.edu/dataset/80 (the test half, which scikit-learn contains)
    """

    def __init__(self, train: bool, sample_shape: Sequence[int], num_outputs: int) -> None:
        check_images(sample_shape, num_outputs, images=(1, 28, 28), num_classes=10)
        pixels, targets = _read()
        # A separate generator, so that the split does not depend on the seed of the run.
        order = torch.randperm(len(targets), generator=torch.Generator().manual_seed(0))
        rows = order[:NUM_TRAIN] if train else order[NUM_TRAIN:]
        # Scaled in float64 and rounded once, so that the values do not depend on the processor's order of operations.
        images = torch.from_numpy(pixels).reshape(-1, 8, 8)[rows, None] / 16  # (N, 1, 8, 8), 16 gray levels
        images = F.interpolate(images, list(sample_shape[1:]), mode="bilinear", align_corners=False)  # (N, 1, H, W)
        super().__init__(images.to(torch.float32), torch.from_numpy(targets).to(torch.int64)[rows])


@cache
def _read() -> tuple[np.ndarray, np.ndarray]:
    """Return the pixels (1797, 64) and the classes (1797,), float64, like `sklearn.datasets.load_digits`.

    That function imports scipy and pandas, which takes longer than training on the digits.
    """
    found = find_spec("sklearn")  # without importing it
    path = Path(found.origin).parent / "datasets" / "data" / "digits.csv.gz" if found and found.origin else None
    if path is None or not path.exists():  # other versions may store them elsewhere
        from sklearn.datasets import load_digits

        digits = load_digits()
        return digits.data, digits.target.astype(np.float64)
    table = np.loadtxt(path, delimiter=",")
    return table[:, :-1], table[:, -1]
