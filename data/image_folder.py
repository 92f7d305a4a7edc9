"""The user's images, one directory per class, decoded when they are needed."""

import os
from collections.abc import Sequence
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset
from torchvision import datasets
from torchvision.transforms import functional as F

from .checks import check_sizes

MODES = {1: "L", 3: "RGB"}


class ImageFolder(Dataset[tuple[Tensor, Tensor]]):
    """The images below root/train/CLASS or root/val/CLASS as (C, H, W) float32 in [0, 1], and their classes.

    An image is scaled until it covers H x W, keeping its aspect ratio, and cropped to its center. Classes are numbered
    in the order of their directories' names, which must be the same in both splits.
    Raises ValueError unless the samples have 1 or 3 channels, the directories exist, each class has an image and there
    are as many outputs as classes; reading raises it for an image that cannot be decoded.
    """

    def __init__(
        self, train: bool, sample_shape: Sequence[int], num_outputs: int, root: str = "datasets/image_folder"
    ) -> None:
        check_sizes(sample_shape, num_outputs)
        if len(sample_shape) != 3 or sample_shape[0] not in MODES:
            raise ValueError(
                f"sample_shape={list(sample_shape)} must be [channels, height, width] with 1 or 3 channels; "
                "try [3, 224, 224]"
            )
        directory = Path(root).expanduser()
        classes = _classes(directory / "train", root)
        different = sorted(set(classes) ^ set(_classes(directory / "val", root)))
        if different:
            # Otherwise validation and training would number their classes differently.
            raise ValueError(
                f"root={root} must have the same class directories in train and val, but only one of them has "
                f"{', '.join(different)}"
            )
        if num_outputs != len(classes):
            raise ValueError(
                f"num_outputs={num_outputs} must be {len(classes)}, the number of class directories in "
                f"{directory / 'train'}; set data.num_outputs={len(classes)}"
            )
        try:
            images = datasets.ImageFolder(directory / ("train" if train else "val"))
        except FileNotFoundError as error:
            raise ValueError(f"root={root} must contain an image of each class: {error}") from error
        self.files = images.samples  # (path, class) of every image
        self.mode = MODES[sample_shape[0]]
        self.height, self.width = sample_shape[1:]

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.unpacked(self.packed(index))

    def packed(self, index: int) -> tuple[Tensor, Tensor]:
        """Return the form to be cached: the image as (C, H, W) uint8, a quarter of the bytes of float32."""
        path, target = self.files[index]
        try:
            with Image.open(path) as file:
                image = file.convert(self.mode)
        except OSError as error:  # Pillow's own error does not always name the file
            raise ValueError(f"{path} cannot be decoded ({error}); replace or remove it") from error
        scale = max(self.height / image.height, self.width / image.width)
        size = [max(self.height, round(image.height * scale)), max(self.width, round(image.width * scale))]
        image = F.center_crop(F.resize(image, size), [self.height, self.width])
        return F.pil_to_tensor(image), torch.tensor(target)  # (C, H, W), ()

    def unpacked(self, sample: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Convert a packed sample, or a batch of them, to the form that `__getitem__` returns."""
        images, targets = sample
        return images.to(torch.float32).div_(255), targets


def _classes(directory: Path, root: str) -> list[str]:
    """Return the names of the class directories, sorted as torchvision numbers them."""
    if not directory.is_dir():
        raise ValueError(
            f"root={root} must contain train and val with a directory per class, but {directory} does not exist"
        )
    return sorted(entry.name for entry in os.scandir(directory) if entry.is_dir())
