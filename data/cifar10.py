"""CIFAR-10: 50,000 small color photographs for training and 10,000 for validation."""

from collections.abc import Sequence

import torch
from torchvision import datasets

from .checks import check_images
from .files import open_files
from .tensors import TensorData


class CIFAR10(TensorData):
    """32 x 32 color images as (3, H, W) float32 in [0, 1], and their classes, from root/cifar-10-batches-py.

    Raises ValueError unless the samples have three channels and there are 10 outputs, and if the files are missing
    and cannot be downloaded.
    Source: https://www.cs.toronto.edu/~kriz/cifar.html
    """

    def __init__(
        self,
        train: bool,
        sample_shape: Sequence[int],
        num_outputs: int,
        root: str = "datasets",
        download: bool = True,
    ) -> None:
        check_images(sample_shape, num_outputs, images=(3, 32, 32), num_classes=10)
        kind = datasets.CIFAR10
        files = open_files(
            kind,
            root,
            train,
            download,
            folder=kind.base_folder,
            names=[name for name, _ in (*kind.train_list, *kind.test_list)] + [kind.meta["filename"]],
            archives=[kind.filename],
        )
        images = torch.from_numpy(files.data).permute(0, 3, 1, 2).contiguous()  # (N, 32, 32, 3) -> (N, 3, 32, 32)
        super().__init__(images, torch.tensor(files.targets, dtype=torch.int64), image_size=sample_shape[1:])
