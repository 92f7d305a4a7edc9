"""The samples of a split as a rank reads them: rows of a dataset, which may be cached and transformed."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, get_worker_info

from runner.input.checksum import Shapes, row_checksums, row_shapes, sample_checksum
from runner.input.device_samples import VALUE, DeviceSamples
from runner.input.pytree import collate, describe, map_tensors, tensors
from runner.input.rng import COLLATE, EPOCH, SAMPLE, DrawDetector, isolated, seeded
from runner.input.sample_cache import CannotCache, SampleCache


@dataclass(eq=False, repr=False)
class Source(Dataset[Any]):
    """A dataset with its optional members (docs/data.md), and what the run adds to it.

    Other attributes of the dataset, such as `classes`, are accessible as attributes of the source.
    """

    dataset: Any
    rows: torch.Tensor | None = None  # (N,) int64, the samples of the dataset that belong to this split; None: all
    cache: SampleCache | DeviceSamples | None = None
    transform: Callable[[Any, int, int], Any] | None = None  # called with a sample, its epoch and its index
    # Transforms a batch of samples in memory, with their epoch and indices; None: `transform` is called for each.
    transform_batch: Callable[[Any, int, Sequence[int]], Any] | None = None
    returns_lists: bool = False  # `__getitems__` returns a list of samples, as torch's Subset does, not a batch
    _sample_draws: DrawDetector = field(default_factory=DrawDetector, init=False, repr=False)
    _row_shapes: Shapes | None = field(default=None, init=False, repr=False)  # of a batch of one sample, once read
    collate_draws: DrawDetector = field(default_factory=DrawDetector, init=False)  # numbers depend on the batch

    @classmethod
    def of(cls, dataset: Any) -> "Source":
        """Return a source of all samples. Read the first one to find out what `__getitems__` returns."""
        returns_lists = False
        if hasattr(dataset, "__getitems__"):
            with suppress(Exception), isolated():  # an error of the user's code is reported by the first real read
                batch = dataset.__getitems__([0])
                # A list may also be a batch of inputs and targets, but then its items differ from a sample.
                is_list = isinstance(batch, list) and len(batch) == 1
                returns_lists = is_list and describe(batch[0]) == describe(dataset[0])
        return cls(dataset, returns_lists=returns_lists)

    def __len__(self) -> int:
        return len(self.dataset) if self.rows is None else len(self.rows)

    def __getitem__(self, index: int) -> Any:
        """Return a sample of the first epoch."""
        return self._sample(self._in_epoch(0, 0), 0, index)

    def __getattr__(self, name: str) -> Any:
        if name == "dataset" or name.startswith("__"):  # before `dataset` exists, for example while unpickling
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def __getstate__(self) -> dict[str, Any]:
        # Another process fills its own cache, but only this one uses the device.
        return {**self.__dict__, "cache": isinstance(self.cache, SampleCache)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, cache=None)
        if state["cache"]:
            self.cache_samples()

    @property
    def sample_weights(self) -> Any:
        """The dataset's weights of these samples. Raise AttributeError if it has none."""
        weights = self.dataset.sample_weights
        return weights if self.rows is None else torch.as_tensor(weights)[self.rows]

    @property
    def block_ends(self) -> Any:
        """The number of these samples up to the end of each block. Raise AttributeError if the dataset has none."""
        ends = np.asarray(self.dataset.block_ends)
        if self.rows is None:
            return ends
        ends = np.unique(np.searchsorted(self.rows.numpy(), ends))
        return ends[ends > 0]  # without blocks that have none of these samples

    @property
    def reads_ahead(self) -> bool:
        """True if several batches may be read at once and then split."""
        may_be_split = self.cache is not None or getattr(self.dataset, "reads_ahead", False)
        return self._reads_batches(self.dataset) and bool(may_be_split)

    def cache_samples(self) -> None:
        """Keep each sample in memory once it is read. Raise CannotCache if the dataset does not permit that."""
        if self.reads_ahead:
            raise CannotCache("its samples are in memory already")
        self._check_batches("true")
        unpack = self.dataset.unpacked if hasattr(self.dataset, "packed") else None
        self.cache = SampleCache(self._read_packed, len(self), unpack, self.dataset_indices)

    def keep_on(self, device: torch.device) -> None:
        """Keep each sample on the device, after `prepare` of the cache.

        Raise CannotCache if the dataset does not permit that.
        """
        self._check_batches(VALUE)
        self.cache = DeviceSamples(self._read_rows, len(self), device, self.dataset_indices, self._has_batches)

    def _check_batches(self, value: str) -> None:
        """Raise CannotCache if batches cannot be combined from samples that are kept by keep_samples=`value`."""
        if hasattr(self.dataset, "in_epoch"):
            raise CannotCache("its samples change from epoch to epoch (in_epoch)", value)
        if hasattr(self.dataset, "collate"):
            raise CannotCache("it collates batches itself (collate)", value)

    def copy_ahead(self, indices: Sequence[int]) -> None:
        """Let the dataset copy the blocks of these samples, if it can, because they will be read later."""
        if indices and self.cache is None and hasattr(self.dataset, "copy_ahead"):
            self.dataset.copy_ahead(self.dataset_indices(indices))

    def dataset_indices(self, indices: Sequence[int]) -> list[int]:
        """Return the dataset's own indices of samples of this split; messages and files name samples by them."""
        return list(indices) if self.rows is None else self.rows[torch.as_tensor(indices, dtype=torch.int64)].tolist()

    def read(
        self,
        indices: Sequence[int],
        epoch: int = 0,
        seed: int = 0,
        stand_in: int = 0,
        checksums: list[float] | None = None,
    ) -> Any:
        """Return a batch of the samples. Random numbers that reading a sample draws follow from seed, epoch and index.

        If there are no indices, return a batch of the sample `stand_in` without NaN, which would reach the gradients of
        other samples: 0 * NaN is NaN. The list `checksums` gets the checksum of each sample.
        """
        batch = self._read(indices or [stand_in], epoch, seed, checksums if indices else None)
        if indices:
            return batch
        return map_tensors(lambda tensor: tensor.nan_to_num(0.0, 0.0, 0.0), batch)

    def __getitems__(self, arguments: tuple[bool, Sequence[int], int, int]) -> tuple[Any, list[float]]:
        """Return a batch for DataLoader, and the checksums of its samples if the first argument is true.

        In a worker, SystemExit and KeyboardInterrupt become a RuntimeError.
        """
        is_hashed, indices, epoch, seed = arguments
        checksums = list[float]()
        try:
            return self.read(indices, epoch, seed, checksums=checksums if is_hashed else None), checksums
        except (SystemExit, KeyboardInterrupt) as error:
            if get_worker_info() is None:
                raise
            raise RuntimeError(f"the dataset raised {error!r}") from error

    def _read(self, indices: Sequence[int], epoch: int, seed: int, checksums: list[float] | None) -> Any:
        dataset = self._in_epoch(epoch, seed)
        reads_batches = self._reads_batches(dataset)

        def read() -> Any:
            """Read the samples at once, or one by one if that draws: each sample must have its own random numbers."""
            if reads_batches and not self._sample_draws.has_drawn:
                device = self.cache if isinstance(self.cache, DeviceSamples) and checksums is not None else None
                on_host = device.host_batch(indices) if device else None  # hashing the device's would wait for it
                batch = self._batch(dataset, indices)
                if checksums is not None:
                    if self._row_shapes is None and not self.reads_ahead:
                        self._row_shapes = row_shapes(self._batch(dataset, [0]))
                    hashed = batch if on_host is None else on_host
                    checksums[:] = row_checksums(hashed, len(indices), self._row_shapes or row_shapes(batch))
                return batch
            if checksums is None and self._transforms_batches:
                assert self.transform_batch is not None
                batch = self._read_rows(indices) if self.cache is None else self.cache.batch(indices)
                return self.transform_batch(batch, epoch, indices)
            samples = []
            kept = self.cache.batch(indices) if isinstance(self.cache, DeviceSamples) else None
            for number, index in enumerate(indices):
                self._sample_draws.seed(seed, epoch, index, SAMPLE)
                if reads_batches:
                    samples.append(_row(self._batch(dataset, [index]), 0))
                elif kept is not None:
                    samples.append(self._transformed(_row(kept, number), epoch, index))
                else:
                    samples.append(self._sample(dataset, epoch, index))
            if checksums is not None:
                checksums[:] = map(sample_checksum, samples)
            if reads_batches or not hasattr(dataset, "collate"):
                return collate(samples)
            return self._collated(dataset, samples, (seed, epoch, indices[0]))

        return self._sample_draws.call(read)

    def _collated(self, dataset: Any, samples: list[Any], key: tuple[int, int, int]) -> Any:
        """Return the batch of the dataset's `collate`, whose random numbers follow from the key."""

        def collate_seeded() -> Any:
            self.collate_draws.seed(*key, COLLATE)
            return dataset.collate(samples)

        batch = self.collate_draws.call(collate_seeded)
        lengths = [len(tensor) for tensor in tensors(batch) if tensor.dim()]
        if len(samples) not in lengths:
            raise ValueError(
                f"collate of {type(self.dataset).__name__} got {len(samples)} samples, but none of the tensors that it "
                f"returned has as many rows: they have {lengths}; a batch must contain every sample"
            )
        return batch

    def _in_epoch(self, epoch: int, seed: int) -> Any:
        """Return the dataset of an epoch."""
        if not hasattr(self.dataset, "in_epoch"):
            return self.dataset
        with seeded(seed, epoch, EPOCH):
            return self.dataset.in_epoch(epoch)

    def _reads_batches(self, dataset: Any) -> bool:
        """Return True if batches are read at once. Samples to transform or collate are read one by one."""
        if self.transform is not None:
            return False
        is_collated = self.returns_lists and hasattr(dataset, "collate")
        return self.cache is not None or (hasattr(dataset, "__getitems__") and not is_collated)

    @property
    def _transforms_batches(self) -> bool:
        """True if the samples are in memory, and their batches can be transformed at once."""
        is_plain = self._has_batches and not hasattr(self.dataset, "collate") and not hasattr(self.dataset, "in_epoch")
        can_read = self.cache is not None or is_plain
        return can_read and self.transform_batch is not None and not self._sample_draws.has_drawn

    def _batch(self, dataset: Any, indices: Sequence[int]) -> Any:
        """Return a batch of a dataset with `__getitems__`, or of cached samples."""
        if self.cache is not None:
            return self.cache.batch(indices)
        batch = dataset.__getitems__(self.dataset_indices(indices))
        return collate(batch) if self.returns_lists else batch

    def _sample(self, dataset: Any, epoch: int, index: int) -> Any:
        cached = None if self.cache is None else _row(self.cache.batch([index]), 0)
        sample = dataset[self.dataset_indices([index])[0]] if cached is None else cached
        return self._transformed(sample, epoch, index)

    def _transformed(self, sample: Any, epoch: int, index: int) -> Any:
        return sample if self.transform is None else self.transform(sample, epoch, index)

    @property
    def _has_batches(self) -> bool:
        """True if the dataset reads batches whose rows do not depend on each other, as one does that is in memory."""
        return hasattr(self.dataset, "__getitems__") and bool(getattr(self.dataset, "reads_ahead", False))

    def _read_rows(self, indices: Sequence[int]) -> Any:
        """Return a batch of the dataset. Samples that may depend on others of the batch are read one by one."""
        own = self.dataset_indices(indices)
        if self._has_batches:
            return collate(self.dataset.__getitems__(own)) if self.returns_lists else self.dataset.__getitems__(own)
        return collate([self.dataset[index] for index in own])

    def _read_packed(self, index: int) -> Any:
        """Return a sample in the form that is cached, as a batch of one."""
        return collate([getattr(self.dataset, "packed", self.dataset.__getitem__)(*self.dataset_indices([index]))])


def _row(batch: Any, number: int) -> Any:
    return map_tensors(lambda tensor: tensor[number], batch)
