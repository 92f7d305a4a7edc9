"""Reads shares of samples from a data set, in the rank's own process or in its workers, and collates them."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.utils.data import Dataset

from runner.training.drawing import COLLATE, EPOCH, SAMPLE, Draws
from runner.training.loader_workers import collated
from runner.training.pytree import collate, join, map_tensors, tensors


class Share(NamedTuple):
    """Some samples of an epoch."""

    epoch: int
    indices: list[int]


class Reader(Dataset[Any]):
    """A data set to DataLoader, asked for one share at a time.

    dataset: with `__getitems__` it cuts and collates whole shares itself; with `collate(samples)` it collates what
        `__getitem__` gave. What it draws from torch, NumPy and random follows from seed, epoch and index.
    cuts_empty: an empty share is the first sample cut to no rows; else it is the first sample, whole.
    """

    def __init__(self, dataset: Any, cuts_empty: bool = False, seed: int = 0):
        self._dataset, self._cuts_empty, self._seed = dataset, cuts_empty, seed
        self._of_epoch, self._of_samples, self._of_collate = Draws(), Draws(), Draws()

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        raise NotImplementedError("shares are read whole")

    def __getitems__(self, share: Share) -> Any:
        if share.indices:
            return self._read(share.epoch, share.indices)
        batch = self._read(share.epoch, [0])
        return map_tensors(lambda tensor: tensor[:0] if self._cuts_empty else _without_nan(tensor), batch)

    @property
    def collate_draws(self) -> bool:
        """Whether collate has drawn: its numbers depend on how a batch is cut."""
        return bool(self._of_collate)

    def _read(self, epoch: int, indices: Sequence[int]) -> Any:
        dataset = self._in_epoch(epoch)
        if hasattr(dataset, "__getitems__"):
            return self._of_samples.call(lambda: self._whole(dataset, epoch, indices))
        samples = self._of_samples.call(lambda: self._one_by_one(dataset.__getitem__, epoch, indices))
        if not hasattr(dataset, "collate"):
            return collated(samples, collate)
        batch = self._of_collate.call(lambda: self._collate(dataset, epoch, indices, samples))
        first = [len(tensor) for tensor in tensors(batch) if tensor.dim()]
        if len(samples) not in first:
            raise ValueError(
                f"collate of {type(self._dataset).__name__} was given {len(samples)} samples, but none of the tensors "
                f"that it made has so many rows: they have {first}; a batch must hold every sample"
            )
        return batch

    def _in_epoch(self, epoch: int) -> Any:
        if not hasattr(self._dataset, "in_epoch"):
            return self._dataset

        def read() -> Any:
            self._of_epoch.seed(self._seed, epoch, EPOCH)
            return read_in(self._dataset, epoch)

        return self._of_epoch.call(read)

    def _whole(self, dataset: Any, epoch: int, indices: Sequence[int]) -> Any:
        """By `__getitems__`: at once, or each alone where it draws, since what is drawn at once depends on the cut."""
        if not self._of_samples:
            return dataset.__getitems__(indices)
        batches = self._one_by_one(lambda index: dataset.__getitems__([index]), epoch, indices)
        try:
            return join(batches)
        except ValueError as error:
            raise ValueError(
                f"__getitems__ of {type(self._dataset).__name__} draws random numbers, and is asked for one sample at "
                f"a time, so that they do not depend on how a batch is cut; but {error}: draw in __getitem__ alone"
            ) from None

    def _one_by_one(self, read: Any, epoch: int, indices: Sequence[int]) -> list[Any]:
        samples = []
        for index in indices:
            self._of_samples.seed(self._seed, epoch, index, SAMPLE)
            samples.append(read(index))
        return samples

    def _collate(self, dataset: Any, epoch: int, indices: Sequence[int], samples: list[Any]) -> Any:
        self._of_collate.seed(self._seed, epoch, indices[0], COLLATE)
        return dataset.collate(samples)


def read_in(dataset: Any, epoch: int) -> Any:
    """What is read in an epoch: the data set's own `in_epoch(epoch)`, if it has that, or the data set as it is."""
    return dataset.in_epoch(epoch) if hasattr(dataset, "in_epoch") else dataset


def reads_ahead(dataset: Any) -> bool:
    """Whether the data set says that a row is the same, whatever rows it is cut with: then many are read at once."""
    return hasattr(dataset, "__getitems__") and bool(getattr(dataset, "reads_ahead", False))


def _without_nan(tensor: torch.Tensor) -> torch.Tensor:
    """What counts nothing must not reach the gradients: 0 * NaN is NaN."""
    return tensor.nan_to_num(0.0, 0.0, 0.0) if tensor.is_floating_point() else tensor
