"""The user's images, one directory per class, decoded when they are needed."""

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from torch.utils.data import Dataset

from .checks import check_sizes
from .image_files import MODES, image_endings, read_image, scale_and_crop


class ImageFolder(Dataset[tuple[Tensor, Tensor]]):
    """The images below root/train/CLASS, root/val/CLASS or root/test/CLASS as (C, H, W) float32 in [0, 1].

    The targets are their classes. The directories of validation and test images are optional.

    An image is scaled until it covers H x W, keeping its aspect ratio, and cropped to its center. Classes are numbered
    in the order of their directories' names, which must be the same in all splits. Hidden files and directories, and
    files that Pillow does not decode according to their endings, are skipped and counted in `header_lines`.
    Raises ValueError unless the samples have 1 or 3 channels, the directories exist, each class has an image and there
    are as many outputs as classes; reading raises it for an image that cannot be decoded.
    """

    def __init__(
        self,
        split: Literal["train", "val", "test"],
        sample_shape: Sequence[int],
        num_outputs: int,
        root: str = "datasets/image_folder",
    ) -> None:
        check_sizes(sample_shape, num_outputs)
        if len(sample_shape) != 3 or sample_shape[0] not in MODES:
            raise ValueError(
                f"sample_shape={list(sample_shape)} must be [channels, height, width] with 1 or 3 channels; "
                "try [3, 224, 224]"
            )
        directory = Path(root).expanduser()
        classes = _classes(directory / "train", root)
        if split != "train":
            different = sorted(set(classes) ^ set(_classes(directory / split, root)))
            if different:  # training would number its classes differently
                raise ValueError(
                    f"root={root} must have the same class directories in train and {split}, but only one of them has "
                    f"{', '.join(different)}"
                )
        if num_outputs != len(classes):
            raise ValueError(
                f"num_outputs={num_outputs} must be {len(classes)}, the number of class directories in "
                f"{directory / 'train'}; set data.num_outputs={len(classes)}"
            )
        images = _Images(directory / split, root)
        self.classes = classes  # their names
        self.files = images.files(classes)  # (path, class) of every image
        self.header_lines = images.describe_skipped()
        self.mode = MODES[sample_shape[0]]
        self.height, self.width = sample_shape[1:]

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.unpacked(self.packed(index))

    def packed(self, index: int) -> tuple[Tensor, Tensor]:
        """Return the form to be cached: the image as (C, H, W) uint8, a quarter of the bytes of float32."""
        path, target = self.files[index]
        image = scale_and_crop(read_image(path, self.mode), self.height, self.width)
        return image, torch.tensor(target)  # (C, H, W), ()

    def unpacked(self, sample: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Convert a packed sample, or a batch of them, to the form that `__getitem__` returns."""
        images, targets = sample
        return images.to(torch.float32).div_(255), targets


class _Images:
    """The images of a split, and what is skipped when they are searched."""

    def __init__(self, directory: Path, root: str) -> None:
        self._directory, self._root = directory, root
        self._endings = image_endings()
        self._other_endings: Counter[str] = Counter()
        self._num_hidden_files = 0
        self._hidden_directories: list[str] = []
        self._outside: list[str] = []

    def files(self, classes: Sequence[str]) -> list[tuple[str, int]]:
        """Return the paths of all images, sorted within each class, and their classes. Raise ValueError without any."""
        for entry in sorted(os.scandir(self._directory), key=lambda entry: entry.name):
            if not entry.is_dir():
                self._outside.append(entry.name)
            elif entry.name.startswith("."):
                self._hidden_directories.append(entry.name)
        found = []
        for number, name in enumerate(classes):
            paths = self._search(self._directory / name)
            if not paths:
                skipped = "; ".join(self.describe_skipped())
                raise ValueError(
                    f"root={self._root} must contain an image of each class, but {self._directory / name} has none"
                    + (f" ({skipped})" if skipped else "")
                )
            found += [(path, number) for path in paths]
        return found

    def _search(self, directory: Path) -> list[str]:
        found, read = [], set[str]()
        for parent, directories, names in os.walk(directory, onerror=self._refuse, followlinks=True):
            if (real := os.path.realpath(parent)) in read:  # such as a link to the directory that contains it
                raise ValueError(f"root={self._root}: {parent} links to {real}, which is read already; remove the link")
            read.add(real)
            self._hidden_directories += sorted(name for name in directories if name.startswith("."))
            directories[:] = [name for name in directories if not name.startswith(".")]
            for name in names:
                ending = os.path.splitext(name)[1].lower()
                if name.startswith("."):
                    self._num_hidden_files += 1
                elif ending in self._endings:
                    found.append((parent, name))
                else:
                    self._other_endings[ending or "without an ending"] += 1
        return [os.path.join(*parts) for parts in sorted(found)]

    def _refuse(self, error: OSError) -> None:
        raise ValueError(f"root={self._root}: {error.filename} cannot be read ({error.strerror})") from error

    def describe_skipped(self) -> list[str]:
        """Return a line about the files and directories that were skipped, or no line."""
        parts = [f"{ending} {count}" for ending, count in sorted(self._other_endings.items())]
        if parts:
            parts = [f"files that are not images ({_listed(parts)})"]
        if self._num_hidden_files:
            parts.append(f"hidden files ({self._num_hidden_files})")
        if self._hidden_directories:
            parts.append(f"hidden directories ({_listed(sorted(set(self._hidden_directories)))})")
        if self._outside:
            parts.append(f"files outside of the class directories ({_listed(self._outside)})")
        return [f"skipped in {self._directory}: {', '.join(parts)}"] if parts else []


def _listed(items: Sequence[str], most: int = 8) -> str:
    return ", ".join(items[:most]) + (", ..." if len(items) > most else "")


def _classes(directory: Path, root: str) -> list[str]:
    """Return the names of the class directories, sorted."""
    if not directory.is_dir():
        raise ValueError(
            f"root={root}: the {directory.name} split needs a directory per class in {directory}, which does not exist"
        )
    return sorted(entry.name for entry in os.scandir(directory) if entry.is_dir() and not entry.name.startswith("."))
