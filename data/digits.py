"""The 8 x 8 digits that scikit-learn carries: real images that need no download."""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
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
        pixels, targets = _read()
        # A generator of its own: the split is the same whatever the seed of the run.
        order = torch.randperm(len(targets), generator=torch.Generator().manual_seed(0))
        rows = order[:NUM_TRAIN] if train else order[NUM_TRAIN:]
        # Scaled in float64 and rounded once, so that no processor's order of operations shows in the values.
        images = torch.from_numpy(pixels).reshape(-1, 8, 8)[rows, None] / 16  # (N, 1, 8, 8), 16 gray levels
        images = F.interpolate(images, list(sample_shape[1:]), mode="bilinear", align_corners=False)  # (N, 1, H, W)
        super().__init__(images.to(torch.float32), torch.from_numpy(targets).to(torch.int64)[rows])


def _read() -> tuple[np.ndarray, np.ndarray]:
    """The pixels (1797, 64) and the classes (1797,), float64, as `sklearn.datasets.load_digits` reads them.

    That imports scipy and pandas too, in more time than training on the digits takes.
    """
    found = find_spec("sklearn")  # which is not imported
    path = Path(found.origin).parent / "datasets" / "data" / "digits.csv.gz" if found and found.origin else None
    if path is None or not path.exists():  # another version of it keeps them elsewhere
        from sklearn.datasets import load_digits

        digits = load_digits()
        return digits.data, digits.target.astype(np.float64)
    table = np.loadtxt(path, delimiter=",")
    return table[:, :-1], table[:, -1]
