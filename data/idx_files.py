"""Images and labels in MNIST's format, IDX, read without torchvision: importing that takes each rank a second.

Where the files are missing, torchvision fetches them.
Source: http://yann.lecun.com/exdb/mnist/
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from data.files import open_files

NAMES = tuple(f"{part}-{what}-ubyte" for part in ("train", "t10k") for what in ("images-idx3", "labels-idx1"))


class IdxFiles:
    """Of root/NAME/raw, NAME being the class's, as torchvision's class of that name has them.

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


def open_idx(name: str, root: str, train: bool, download: bool) -> Any:
    """The files of torchvision's data set of that name, as `open_files` opens them, with what it raises."""
    kind, folder = type(name, (IdxFiles,), {}), f"{name}/raw"
    archives = [f"{folder}/{file}.gz" for file in NAMES]
    return open_files(kind, root, train, download, folder=folder, names=NAMES, archives=archives)


def read_idx(path: Path, num_dims: int) -> Tensor:
    """The bytes of a file, in the shape that it names. Raises ValueError where it is none of so many dimensions."""
    with path.open("rb") as file:
        header = np.frombuffer(file.read(4 * (1 + num_dims)), dtype=">u4")
        if header[:1].tolist() != [0x800 + num_dims] or len(header) != 1 + num_dims:
            raise ValueError(f"{path.name} does not begin as a file of bytes in {num_dims} dimensions does")
        shape = header[1:].tolist()
        content = np.fromfile(file, dtype=np.uint8)
    if len(content) != np.prod(shape, dtype=np.int64):
        raise ValueError(f"{path.name} has {len(content)} bytes where its shape is {shape}")
    return torch.from_numpy(content.reshape(shape))
