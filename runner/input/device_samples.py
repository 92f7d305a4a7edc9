"""Samples that a rank reads once and keeps in the memory of its device, where it selects its batches."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_unflatten

from runner.distributed.local.exchange import LocalExchange
from runner.distributed.machine import available_memory
from runner.input.sample_cache import CannotCache, UniformSamples

VALUE = "device"  # of keep_samples
BYTES_AT_ONCE = 64 * 2**20  # of the samples that are copied to the device together


class DeviceSamples:
    """Samples of one shape, each of which is read once, and selected on the device afterwards.

    Until `prepare` is called, batches are read and returned on the CPU. Floating-point samples keep the dtype of the
    dataset, so that transforms compute the same values as on the CPU. Raises CannotCache if the first sample is not
    suitable.

    Args:
        read: Returns the batch of some samples.
        device: On which the samples must fit.
        dataset_indices: Returns the indices by which messages name samples.
        at_once: All samples are read by `prepare`, because the dataset has them in memory.
    """

    def __init__(
        self,
        read: Callable[[Sequence[int]], Any],
        num_samples: int,
        device: torch.device,
        dataset_indices: Callable[[Sequence[int]], list[int]] = list,
        at_once: bool = False,
    ):
        self._samples = UniformSamples(VALUE, read, dataset_indices)
        self._kept: list[torch.Tensor] = []  # one tensor for each leaf of a sample, with a row for each sample
        self.device, self._at_once = device, at_once
        sizes = (shape.numel() * dtype.itemsize for shape, dtype in self._samples.kinds)
        self.num_bytes = num_samples * sum(sizes)
        if self.num_bytes > self._memory_left:
            raise self._too_large()
        self._is_kept = np.zeros(num_samples, dtype=bool)

    def prepare(self, exchange: LocalExchange | None) -> None:
        """Allocate the memory on the device, to which all samples are read now, or each one when it is needed.

        exchange: of the ranks of this machine, which share nothing.
        """
        try:
            self._kept = [
                torch.empty((len(self._is_kept), *shape), dtype=dtype, device=self.device)
                for shape, dtype in self._samples.kinds
            ]
        except torch.OutOfMemoryError:
            raise self._too_large() from None
        num_samples = len(self._is_kept)
        size = max(1, BYTES_AT_ONCE * num_samples // max(1, self.num_bytes))
        for first in range(0, num_samples, size) if self._at_once else ():
            rows = np.arange(first, min(first + size, num_samples))
            self._store(rows, self._samples.read(rows.tolist()))

    def batch(self, indices: Sequence[int]) -> Any:
        """Return a batch on the device. Raise CannotCache if a sample has another shape or draws random numbers."""
        if not self._kept:
            return self.host_batch(indices)
        rows = np.asarray(indices, np.int64)
        if len(missing := np.unique(rows[~self._is_kept[rows]])):
            self._store(missing, self._samples.read(missing.tolist()))
        at = torch.from_numpy(rows).to(self.device, non_blocking=True)
        return tree_unflatten([leaf.index_select(0, at) for leaf in self._kept], self._samples.structure)

    def host_batch(self, indices: Sequence[int]) -> Any:
        """Return a batch on the CPU, which is read from the dataset."""
        leaves, rows = self._samples.read(indices), np.asarray(indices, np.int64)
        if self._kept and not self._is_kept[rows].all():
            self._store(rows, leaves)
        return tree_unflatten(leaves, self._samples.structure)

    def _store(self, rows: np.ndarray[Any, Any], leaves: list[torch.Tensor]) -> None:
        at = torch.from_numpy(rows).to(self.device, non_blocking=True)
        for kept, leaf in zip(self._kept, leaves, strict=True):
            kept.index_copy_(0, at, leaf.to(self.device, non_blocking=True))
        self._is_kept[rows] = True

    @property
    def _memory_left(self) -> float:
        """Bytes that may still be allocated on the device."""
        return torch.cuda.mem_get_info(self.device)[0] if self.device.type == "cuda" else available_memory()

    def _too_large(self) -> CannotCache:
        needed, left = self.num_bytes / 2**30, self._memory_left / 2**30
        return CannotCache(f"the samples need {needed:,.1f} GiB, but {self.device} has {left:,.1f} GiB left", VALUE)
