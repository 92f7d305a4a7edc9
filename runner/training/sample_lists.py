"""Data sets whose `__getitems__` gives a list of samples, as torch's Subset and Hugging Face's have it."""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from runner.training.drawing import apart
from runner.training.pytree import collate, describe


class SampleLists:
    """Such a data set as one that collates what it gives; whatever else it offers is reached through this."""

    def __init__(self, dataset: Any):
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index]

    def __getattr__(self, name: str) -> Any:
        """Only asked for what this has not: `__getitems__` too, unless samples are collated in a way of their own."""
        if name == "dataset" or (name.startswith("__") and name != "__getitems__"):  # while it is being unpickled, say
            raise AttributeError(name)
        if name == "__getitems__":
            if hasattr(self.dataset, "collate"):
                raise AttributeError(name)
            return self._batch
        found = getattr(self.dataset, name)
        return (lambda epoch: _of_lists(found(epoch))) if name == "in_epoch" else found

    def _batch(self, indices: Sequence[int]) -> Any:
        return collate(self.dataset.__getitems__(indices))


def _of_lists(dataset: Any) -> Any:
    """That of an epoch: if it reads several at once, then as the whole does."""
    return SampleLists(dataset) if hasattr(dataset, "__getitems__") else dataset


def as_batches(dataset: Any) -> Any:
    """The data set, or one that reads like it and gives batches; samples are not read here if they cannot be."""
    if hasattr(dataset, "__getitems__"):
        with suppress(Exception), apart():  # reading runs the user's code; what fails does so again where it is told
            given = dataset.__getitems__([0])
            # A list is a batch too, of inputs and targets say, but none of one sample is nested as the sample.
            if isinstance(given, list) and len(given) == 1 and describe(given[0]) == describe(dataset[0]):
                return SampleLists(dataset)
    return dataset
