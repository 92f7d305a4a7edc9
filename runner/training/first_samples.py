"""The first samples of the training data, which the dry runs of an experiment use."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch

from runner.errors import InputError, failed_with
from runner.input.batch import MicroBatch, cast_floating
from runner.input.pytree import describe, map_tensors, split, tensors
from runner.input.source import Source


class FirstSamples:
    """Batches of the first samples; each batch is read once.

    Args:
        source: The training data.
        seed: Of the random numbers that reading a sample draws.
        input_shape: The shape of an input as the data's configuration declares it; None if it does not.
    """

    def __init__(self, source: Source, seed: int, input_shape: Sequence[int] | None = None):
        self.source, self.input_shape = source, input_shape
        self._seed = seed
        self._batches: dict[tuple[int, ...], Any] = {}

    def read(self, indices: Sequence[int]) -> Any:
        """Return a copy of the batch of these samples, because a forward may write to its inputs."""
        key = tuple(indices)
        if key not in self._batches:
            self._batches[key] = self.source.read(indices, seed=self._seed)
        return map_tensors(torch.clone, self._batches[key])

    def batch(self, indices: Sequence[int]) -> MicroBatch:
        """Return the samples with floating-point data in float32, the precision of a new model."""
        data = map_tensors(lambda tensor: cast_floating(tensor, torch.float32), self.read(indices))
        return MicroBatch(data, indices)

    def check(self, choices: Mapping[str, str], indices: Sequence[int]) -> list[str]:
        """Return warnings. Raise InputError if these samples cannot be read or collated."""
        source = self.source
        try:
            data = self.read(indices)
            if len(source) > 1 and (hasattr(source, "collate") or source.reads_ahead):
                pair = self.read([0, 1])  # detects a collate that drops samples
                if source.reads_ahead:
                    split(pair, [1, 1])
        except Exception as error:  # custom code can raise anything
            raise InputError(f"data: its first samples cannot be collated into a batch{failed_with(error)}") from None
        if not tensors(data):
            raise InputError(f"data: a sample must contain tensors or numbers, but the first one is {describe(data)}")
        if source.collate_draws.has_drawn:
            return [
                f"data={choices['data']}: its collate draws random numbers, once for all samples of a local "
                "micro-batch; they depend on micro_batches and the number of ranks, unlike those drawn in __getitem__"
            ]
        if hasattr(source, "collate") and self._are_reordered():
            return [
                f"data={choices['data']}: its collate changes the order of the samples, so that their random numbers, "
                "and the indices in messages and files of task=predict, are those of other samples; keep the order, "
                "for example with pack_padded_sequence(..., enforce_sorted=False)"
            ]
        return []

    def _are_reordered(self) -> bool:
        """Return True if the rows of a batch depend on the samples' values, as in a collate that sorts by length.

        Otherwise, the rows of the first samples in reverse order are in reverse order. Batches whose tensors do not
        all have a row per sample, such as those of graphs, are not examined.
        """
        count = min(len(self.source), 8)
        with suppress(Exception):  # training reports errors; not all types of tensors can be compared
            forward, backward = (tensors(self.read(order)) for order in (range(count), range(count)[::-1]))
            if all(tensor.dim() and len(tensor) == count for tensor in (*forward, *backward)):
                pairs = zip(forward, backward, strict=True)
                return not all(torch.allclose(one, other.flip(0), equal_nan=True) for one, other in pairs)
        return False
