"""Samples that are read once on each machine, in memory that its ranks and their loader workers share."""

import fcntl
import mmap
import os
import tempfile
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from runner.distributed.local.exchange import LocalExchange
from runner.distributed.machine import available_memory
from runner.input.pytree import describe, register_types
from runner.input.rng import DrawDetector


class CannotCache(ValueError):
    """The samples of a dataset cannot be cached."""

    def __init__(self, reason: str, value: str = "true"):
        super().__init__(f"keep_samples={value}: {reason}; leave it out")


class UniformSamples:
    """Samples of a dataset that are tensors of one shape, whose values do not change from epoch to epoch.

    Args:
        value: Of keep_samples, for messages.
        read: Returns the batch of some samples.
        dataset_indices: Returns the indices by which messages name samples.

    Attributes:
        kinds: The shape and the dtype of each leaf of a sample.
        structure: Of a sample.

    Raises CannotCache if the first sample is not suitable.
    """

    def __init__(
        self,
        value: str,
        read: Callable[[Sequence[int]], Any],
        dataset_indices: Callable[[Sequence[int]], list[int]] = list,
    ):
        self._value, self._read, self._dataset_indices = value, read, dataset_indices
        self._draws = DrawDetector()
        first = self._batch([0])
        leaves, self.structure = tree_flatten(register_types(first))
        if not all(isinstance(leaf, torch.Tensor) and leaf.shape[:1] == (1,) and leaf.numel() for leaf in leaves):
            raise CannotCache(f"samples must be tensors and numbers, but the first one is {describe(first)}", value)
        self.kinds = [(leaf.shape[1:], leaf.dtype) for leaf in leaves]

    def read(self, indices: Sequence[int]) -> list[torch.Tensor]:
        """Return the leaves of a batch. Raise CannotCache if a sample has another shape or draws random numbers."""
        batch = self._batch(indices)
        leaves, structure = tree_flatten(register_types(batch))
        kinds = [(leaf.shape[1:], leaf.dtype) for leaf in leaves if isinstance(leaf, torch.Tensor)]
        if structure != self.structure or kinds != self.kinds:
            found = f"sample {self._name(indices)} is {describe(batch)}"
            raise CannotCache(f"samples must have the shape of the first, but {found}", self._value)
        return leaves

    def _batch(self, indices: Sequence[int]) -> Any:
        batch = self._draws.call(lambda: self._read(indices))
        if self._draws.has_drawn:
            drawn = f"sample {self._name(indices)} draws random numbers, which would be the same in all epochs"
            raise CannotCache(drawn, self._value)
        return batch

    def _name(self, indices: Sequence[int]) -> int:
        return self._dataset_indices(indices[:1])[0]


class SampleCache:
    """Samples of one shape, each of which is read when it is first needed, and copied from memory afterwards.

    `read` returns a sample as a batch of one, and `unpack` converts a batch of cached samples to what the dataset
    returns. `dataset_indices` returns the indices by which messages name samples. Raises CannotCache if the first
    sample is not suitable, or if the samples do not fit into memory.
    """

    def __init__(
        self,
        read: Callable[[int], Any],
        num_samples: int,
        unpack: Callable[[Any], Any] | None = None,
        dataset_indices: Callable[[Sequence[int]], list[int]] = list,
    ):
        self._samples = UniformSamples("true", lambda indices: read(indices[0]), dataset_indices)
        self._num_samples, self._unpack = num_samples, unpack
        self._close: Callable[[], object] = lambda: None
        sizes = (num_samples, *(num_samples * shape.numel() * dtype.itemsize for shape, dtype in self._samples.kinds))
        self._starts = [0, *accumulate(-(-size // mmap.PAGESIZE) * mmap.PAGESIZE for size in sizes)]
        self.num_bytes = self._starts[-1]  # the size of the memory for all samples
        needed, left = self.num_bytes / 2**30, available_memory() / 2**30
        if needed > left:
            raise CannotCache(f"the samples need {needed:,.1f} GiB, but {left:,.1f} GiB are left")
        self._map(None)

    def prepare(self, exchange: LocalExchange | None) -> None:
        """Use memory that the ranks of this machine share, all of which must call it; None for a single rank."""
        if exchange is not None:
            self._map(exchange.share_file(self.num_bytes))

    def batch(self, indices: Sequence[int]) -> Any:
        """Return a batch. Raise CannotCache if a sample has another shape or draws random numbers."""
        rows = torch.from_numpy(np.asarray(indices, np.int64))
        with self._locked(fcntl.LOCK_SH):
            is_cached = self._is_cached.index_select(0, rows)
        for index in rows[is_cached == 0].unique().tolist():
            self._store(index)
        batch = tree_unflatten([leaf.index_select(0, rows) for leaf in self._leaves], self._samples.structure)
        return batch if self._unpack is None else self._unpack(batch)

    def _map(self, file: int | None) -> None:
        """Allocate an empty cache, which forked workers share. Pages that are never written take no memory."""
        memory = mmap.mmap(-1 if file is None else file, self.num_bytes)
        if file is None:  # an empty file, only for the lock
            with tempfile.TemporaryFile() as empty:
                file = os.dup(empty.fileno())
        self._close()
        self._file, self._close = file, weakref.finalize(self, os.close, file)
        self._is_cached = torch.frombuffer(memory, dtype=torch.uint8, count=self._num_samples)
        self._leaves = [
            torch.frombuffer(memory, dtype=dtype, count=self._num_samples * shape.numel(), offset=start).view(
                -1, *shape
            )
            for start, (shape, dtype) in zip(self._starts[1:-1], self._samples.kinds, strict=True)
        ]

    def _store(self, index: int) -> None:
        """Write a sample. If two processes do so at once, both write the same values."""
        for target, leaf in zip(self._leaves, self._samples.read([index]), strict=True):
            target[index] = leaf[0]
        with self._locked(fcntl.LOCK_EX):
            self._is_cached[index] = 1

    @contextmanager
    def _locked(self, mode: int) -> Iterator[None]:
        """Lock the flags of cached samples against other processes.

        Processors with weak memory ordering, such as ARM, may show the flag to another process before the sample that
        was written first. Releasing and acquiring a lock orders both writes before both reads.
        """
        fcntl.lockf(self._file, mode)
        try:
            yield
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN)
