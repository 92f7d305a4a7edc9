"""Arrays in NumPy's files: .npy, which are memory-mapped, and .npz."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from .checks import check_rows, check_sizes, could_be_classes
from .tensors import BatchDataset


class Arrays(BatchDataset):
    """Sample i is row i of an array of inputs, (N, *sample_shape), and of an array of targets, (N,) or (N, ...).

    Floating-point values are converted to float32, and integers to int64. Floating-point targets of shape () become
    (1,). A .npy file is memory-mapped, so that a batch reads only its rows; an array of a .npz file is in memory.

    Args:
        inputs, targets: for each split a path, FILE.npy or FILE.npz/NAME; None if the split does not exist.
        divisor: divides the inputs, such as 255 for images of bytes; None leaves them unchanged.

    Raises ValueError if files are missing, differ in length or contain samples of another shape, or if a class is not
    in 0 .. num_outputs - 1.
    """

    def __init__(
        self,
        split: Literal["train", "val", "test"],
        sample_shape: Sequence[int],
        num_outputs: int,
        inputs: Mapping[str, str | None],
        targets: Mapping[str, str | None],
        divisor: float | None = None,
    ) -> None:
        check_sizes(sample_shape, num_outputs)
        if divisor is not None and not divisor > 0:
            raise ValueError(f"divisor={divisor} must be above 0, or null; try 255")
        self.sample_shape, self.divisor = tuple(sample_shape), divisor
        self.inputs = _Array(_path("inputs", inputs, split))
        self.targets = _Array(_path("targets", targets, split))
        shape, target_shape = self.inputs.array.shape, self.targets.array.shape
        if shape[:1] != target_shape[:1]:
            raise ValueError(
                f"targets.{split}={self.targets.path} must have a row for each of the {shape[0] if shape else 0} of "
                f"{self.inputs.path}, but has {target_shape[0] if target_shape else 0}"
            )
        # A dim of size 1 may be missing, such as the channel of gray images; other shapes mean another order of dims.
        if [size for size in shape[1:] if size != 1] != [size for size in sample_shape if size != 1]:
            found = list(shape[1:]) or [1]
            raise ValueError(
                f"sample_shape={list(sample_shape)} must be {found}, the shape of the rows of {self.inputs.path}; "
                f"set data.sample_shape={str(found).replace(' ', '')}"
            )
        self.header_lines = self._check_targets(num_outputs)

    def __len__(self) -> int:
        return len(self.inputs.array)

    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return a batch: (len(indices), *sample_shape) inputs, and their targets."""
        rows = check_rows(indices, len(self)).numpy()
        inputs = _as_tensor(self.inputs.array[rows]).reshape(len(rows), *self.sample_shape)
        if self.divisor is not None:
            inputs = inputs.to(torch.float32) / self.divisor
        targets = _as_tensor(self.targets.array[rows])
        return inputs, targets[:, None] if targets.dim() == 1 and targets.is_floating_point() else targets

    def _check_targets(self, num_outputs: int) -> list[str]:
        """Raise ValueError if the targets do not fit. Return a line for the header if numbers could be classes."""
        array, path = self.targets.array, self.targets.path
        if array.dtype.kind == "f":
            width = array.shape[1] if array.ndim == 2 else 1
            hint = width == 1 and array.ndim <= 2 and could_be_classes(array)
            if array.ndim <= 2 and width != num_outputs:
                raise ValueError(
                    f"num_outputs={num_outputs} must be {width}, the number of targets in a row of {path}; "
                    f"set data.num_outputs={width}" + (", or save classes as integers" if hint else "")
                )
            return [f"{path} contains numbers; if they are classes, save them as integers"] if hint else []
        if array.ndim == 1 and len(array) and not 0 <= array.min() <= array.max() < num_outputs:
            raise ValueError(
                f"num_outputs={num_outputs} must be above every class, but {path} has classes from {array.min()} to "
                f"{array.max()}; "
                + ("number them from 0" if array.min() < 0 else f"set data.num_outputs={array.max() + 1}")
            )
        return []


class _Array:
    """An array and its path. A mapped array is pickled as its path, because pickling it would copy the whole file."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.array = _open(path)

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path} if isinstance(self.array, np.memmap) else vars(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        if "array" not in state:
            self.array = _open(self.path)


def _path(option: str, paths: Mapping[str, str | None], split: str) -> str:
    path = paths.get(split)
    if path is None:
        given = [name for name in ("train", "val", "test") if paths.get(name) is not None]
        have = f"{option} has {' and '.join(given)}" if given else f"{option} has none"
        raise ValueError(f"{option}.{split}=null: the {split} split needs a file, FILE.npy or FILE.npz/NAME; {have}")
    return path


def _open(path: str) -> np.ndarray:
    """Return the array, mapped read-only if it is a .npy file."""
    archive, name = Path(path).expanduser(), None
    if not archive.exists():  # FILE.npz/NAME; names may contain slashes
        for match in re.finditer(r"\.npz(?=/)", path):
            if (file := Path(path[: match.end()]).expanduser()).is_file():
                archive, name = file, path[match.end() + 1 :]
                break
    try:
        found = np.load(archive, mmap_mode="r", allow_pickle=False)
        if isinstance(found, np.ndarray):
            array = found
        else:
            with found:
                if name not in found.files:
                    raise ValueError(f"name one of its arrays: {', '.join(f'{archive}/{key}' for key in found.files)}")
                array = found[name]
    except Exception as error:  # zipfile and zlib have their own for a damaged archive
        reason = error.strerror if isinstance(error, OSError) and error.strerror else " ".join(str(error).split())
        raise ValueError(f"{path} cannot be read as an array: {reason}") from None
    if array.ndim == 0 or array.dtype.kind not in "fiub":
        raise ValueError(f"{path} must contain rows of numbers, not {array.dtype} of shape {list(array.shape)}")
    return array


def _as_tensor(array: np.ndarray) -> Tensor:
    if array.dtype == np.uint64 and array.size and array.max() > np.iinfo(np.int64).max:
        raise ValueError(f"integers must be below 2^63, not {array.max()}")  # the conversion would make it negative
    return torch.from_numpy(np.ascontiguousarray(array, np.float32 if array.dtype.kind == "f" else np.int64))
