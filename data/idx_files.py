"""Images and labels in MNIST's format, IDX, read without torchvision, whose import takes a second on each rank.

If the files are missing, torchvision downloads them.
Source: http://yann.lecun.com/exdb/mnist/
"""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

NAMES = tuple(f"{part}-{what}-ubyte" for part in ("train", "t10k") for what in ("images-idx3", "labels-idx1"))


class IdxFiles:
    """The files in root/NAME/raw. NAME is the name of the class, as in torchvision's class of that name.

    data: (N, H, W) uint8; targets: (N,) int64.
    """

    def __init__(self, root: Path, train: bool = True, download: bool = False) -> None:
        name = type(self).__name__
        if download:
            from torchvision import datasets

            getattr(datasets, name)(root, download=True)
        images, labels = NAMES[:2] if train else NAMES[2:]
        self.data = read_idx(root / name / "raw" / images, num_dims=3)
        self.targets = read_idx(root / name / "raw" / labels, num_dims=1).to(torch.int64)


def read_idx(path: Path, num_dims: int) -> Tensor:
    """Return the bytes of a file in the shape that its header names. Raise ValueError if it has other dims."""
    with path.open("rb") as file:
        header = np.frombuffer(file.read(4 * (1 + num_dims)), dtype=">u4")
        if header[:1].tolist() != [0x800 + num_dims] or len(header) != 1 + num_dims:
            raise ValueError(f"{path.name} does not start like a file of bytes with {num_dims} dims")
        shape = header[1:].tolist()
        content = np.fromfile(file, dtype=np.uint8)
    if len(content) != np.prod(shape, dtype=np.int64):
        raise ValueError(f"{path.name} has {len(content)} bytes, but its shape is {shape}")
    return torch.from_numpy(content.reshape(shape))
