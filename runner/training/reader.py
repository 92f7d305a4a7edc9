"""Reads shares of samples from a data set, in the rank's own process or in its workers, and collates them."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch.utils.data import Dataset

from runner.training.pytree import collate, map_tensors, tensors


class Share(NamedTuple):
    """Some samples of an epoch."""

    epoch: int
    indices: list[int]


class Reader(Dataset[Any]):
    """A data set to DataLoader, asked for one share at a time.

    dataset: with `__getitems__` it cuts and collates whole shares itself; with `collate(samples)` it collates what
        `__getitem__` gave.
    cuts_empty: an empty share is the first sample cut to no rows; else it is the first sample, whole.
    """

    def __init__(self, dataset: Any, cuts_empty: bool = False):
        self._dataset, self._cuts_empty = dataset, cuts_empty

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        raise NotImplementedError("shares are read whole")

    def __getitems__(self, share: Share) -> Any:
        dataset = read_in(self._dataset, share.epoch)
        if share.indices:
            return self._read(dataset, share.indices)
        batch = self._read(dataset, [0])
        return map_tensors(lambda tensor: tensor[:0], batch) if self._cuts_empty else batch

    def _read(self, dataset: Any, indices: Sequence[int]) -> Any:
        if hasattr(dataset, "__getitems__"):
            return dataset.__getitems__(indices)
        samples = [dataset[index] for index in indices]
        if not hasattr(dataset, "collate"):
            return collate(samples)
        batch = dataset.collate(samples)
        first = [len(tensor) for tensor in tensors(batch) if tensor.dim()]
        if len(samples) not in first:
            raise ValueError(
                f"collate of {type(self._dataset).__name__} was given {len(samples)} samples, but none of the tensors "
                f"that it made has so many rows: they have {first}; a batch must hold every sample"
            )
        return batch


def read_in(dataset: Any, epoch: int) -> Any:
    """What is read in an epoch: the data set's own `in_epoch(epoch)`, if it has that, or the data set as it is."""
    return dataset.in_epoch(epoch) if hasattr(dataset, "in_epoch") else dataset
