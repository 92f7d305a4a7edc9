"""Samples that are read once on each machine, and kept in memory that its ranks and their loader workers share."""

import mmap
import os
from collections.abc import Sequence
from contextlib import suppress
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from runner.distributed.local_exchange import LocalExchange
from runner.distributed.shared_memory import new_file
from runner.training.drawing import Draws
from runner.training.pytree import collate, describe, known
from runner.training.reader import reads_ahead


class CannotKeep(ValueError):
    """A data set whose samples are not to be kept."""

    def __init__(self, why: str):
        super().__init__(f"keep_samples=true: {why}; leave it out")


class KeptSamples:
    """A data set whose sample i is read when it is first asked for, and copied from memory from then on.

    Samples are tensors, arrays and numbers of one shape, in any structure, and batches of them are made as by default.
    A data set whose samples take fewer bytes before it makes tensors of them has two methods more: what is kept of
    sample i is `packed(i)`, and `unpacked(batch)` is what the data set gives for some of those, collated.
    Whatever else it offers is reached through this. Raises CannotKeep.
    """

    reads_ahead = True

    def __init__(self, dataset: Any):
        self.dataset = dataset
        if why := _unfit(dataset):
            raise CannotKeep(why)
        self._draws = Draws()
        first = self._read(0)
        leaves, self._structure = tree_flatten(known(first))
        if not all(isinstance(leaf, torch.Tensor) and leaf.shape[:1] == (1,) and leaf.numel() for leaf in leaves):
            raise CannotKeep(f"samples must be tensors and numbers, and the first one is {describe(first)}")
        self._kinds = [(leaf.shape[1:], leaf.dtype) for leaf in leaves]
        sizes = (len(self), *(len(self) * leaf.nbytes for leaf in leaves))
        self._begins = [0, *accumulate(-(-size // mmap.PAGESIZE) * mmap.PAGESIZE for size in sizes)]
        try:
            self._map(None)
        except OSError as error:
            raise CannotKeep(f"no memory for {self.num_bytes / 2**30:,.1f} GiB of samples ({error.strerror})") from None

    @property
    def num_bytes(self) -> int:
        """What all samples take, those that are not read yet too."""
        return self._begins[-1]

    def share(self, here: LocalExchange | None) -> None:
        """From now on in memory that the ranks of this machine see, all of which must call it; None: it has no others.

        Where they have no such memory each keeps its own.
        """
        if here is None or (file := here.shared_file(lambda: new_file(self.num_bytes))) is None:
            return
        with suppress(OSError):
            self._map(file)
        os.close(file)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return tree_map_only(torch.Tensor, lambda tensor: tensor[0], known(self.__getitems__([index])))

    def __getitems__(self, indices: Sequence[int]) -> Any:
        """A batch, collated. Raises CannotKeep for a sample that differs from the first one, or draws."""
        rows = torch.from_numpy(np.asarray(indices, np.int64))
        for index in rows[self._is_kept.index_select(0, rows) == 0].unique().tolist():
            self._keep(index)
        batch = tree_unflatten([leaf.index_select(0, rows) for leaf in self._leaves], self._structure)
        return self.dataset.unpacked(batch) if hasattr(self.dataset, "packed") else batch

    def __getattr__(self, name: str) -> Any:
        if name == "dataset" or name.startswith("__"):  # while it is being unpickled, say
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def _map(self, file: int | None) -> None:
        """Nothing is kept yet. Workers see it too, since they are forked; a page that is never written takes none."""
        memory = mmap.mmap(-1 if file is None else file, self.num_bytes)
        self._is_kept = torch.frombuffer(memory, dtype=torch.uint8, count=len(self))
        self._leaves = [
            torch.frombuffer(memory, dtype=dtype, count=len(self) * shape.numel(), offset=begin).view(-1, *shape)
            for begin, (shape, dtype) in zip(self._begins[1:-1], self._kinds, strict=True)
        ]

    def _keep(self, index: int) -> None:
        """Where two processes do so at once, both write the same."""
        sample = self._read(index)
        leaves, structure = tree_flatten(known(sample))
        kinds = [(leaf.shape[1:], leaf.dtype) for leaf in leaves if isinstance(leaf, torch.Tensor)]
        if structure != self._structure or kinds != self._kinds:
            raise CannotKeep(
                f"samples must be of one shape, but sample {index} is {describe(sample)} and the first one "
                f"{describe(self._read(0))}"
            )
        for kept, leaf in zip(self._leaves, leaves, strict=True):
            kept[index] = leaf[0]
        self._is_kept[index] = 1  # last: who sees it finds the whole sample

    def _read(self, index: int) -> Any:
        """As a batch of one."""
        dataset = self.dataset

        def read() -> Any:
            if hasattr(dataset, "packed"):
                return collate([dataset.packed(index)])
            return dataset.__getitems__([index]) if hasattr(dataset, "__getitems__") else collate([dataset[index]])

        batch = self._draws.call(read)
        if self._draws:
            raise CannotKeep(f"sample {index} draws random numbers, and would be drawn once for all epochs")
        return batch


def _unfit(dataset: Any) -> str:
    """Why no samples of such a data set are kept."""
    if reads_ahead(dataset):
        return "its samples are in memory as it is"
    if hasattr(dataset, "in_epoch"):
        return "its samples are others in each epoch (in_epoch)"
    if hasattr(dataset, "collate"):
        return "it makes batches in a way of its own (collate)"
    return ""
