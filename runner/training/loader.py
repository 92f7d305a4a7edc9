"""Batches of a data set on this rank's device, step by step."""

import itertools
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from runner.distributed.parent import end_at_once_with_parent
from runner.distributed.signals import ignore
from runner.training.batch import MicroBatch, StepBatch
from runner.training.loader_workers import death_behind, shared
from runner.training.precision import Precision
from runner.training.pytree import map_tensors, num_bytes, split
from runner.training.reader import Reader, Share, reads_ahead
from runner.training.sample_weights import read_weights
from runner.training.sampler import Sampler

# Of a data set with `reads_ahead`: what it takes to read a share of a few hundred rows is mostly not the reading.
MOST_AT_ONCE, BYTES_AT_ONCE = 16, 8 * 2**20  # shares; bytes of the batch that they make


class Loader:
    """Reads what the sampler says, in this process or by workers, and puts it on the device.

    dataset: where it `reads_ahead`, and there are no workers, several shares are read at once and then cut.
    cuts_empty: a share without samples is of no rows, and not of one that counts nothing.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        sampler: Sampler,
        precision: Precision,
        device: torch.device,
        memory_format: torch.memory_format = torch.contiguous_format,
        num_workers: int = 0,
        pin_memory: bool | None = None,
        drop_last: bool = False,
        shuffle: bool = True,
        prefetch: int | None = None,
        weights: str | None = None,
        cuts_empty: bool = False,
    ):
        if num_workers < 0:
            raise ValueError(f"loader.num_workers={num_workers} must be at least 0")
        if prefetch is not None and prefetch < 1:
            raise ValueError(f"loader.prefetch={prefetch} must be at least 1, or null")
        if weights is not None and not shuffle:
            raise ValueError(f"loader.shuffle=false has no effect with loader.weights={weights}; leave one of them out")
        drawn_by = None if weights is None else read_weights(weights, dataset)
        sampler = replace(sampler, shuffle=shuffle, drop_last=drop_last, weights=drawn_by)
        if sampler.steps_per_epoch == 0:
            raise ValueError(
                f"loader.drop_last=true with batch_size={sampler.batch_size} leaves no step of the data's "
                f"{sampler.num_samples} samples; try batch_size={sampler.num_samples}"
            )
        self.sampler, self.precision, self.device, self.memory_format = sampler, precision, device, memory_format
        self.dataset = dataset
        self._position = (0, 0)
        self._drawn: deque[list[list[int]]] = deque()  # the shares of each batch that was asked for and is not here yet
        self._reads_ahead = num_workers == 0 and reads_ahead(dataset)
        self._at_once: int | None = None  # shares; the first batch will tell
        self._loader: DataLoader[Any] | None = DataLoader(
            Reader(dataset, cuts_empty, sampler.seed),
            batch_sampler=_Positioned(self),  # any iterable of index lists will do
            num_workers=num_workers,
            collate_fn=shared,
            pin_memory=device.type == "cuda" if pin_memory is None else pin_memory,
            prefetch_factor=prefetch or 2 if num_workers else None,
            persistent_workers=num_workers > 0,
            worker_init_fn=_begin_worker,
            # DataLoader draws its workers' base seed from here: the global stream belongs to the model's dropout.
            generator=torch.Generator().manual_seed(sampler.seed),
        )

    def steps(self, epoch: int, first_step: int = 0) -> Iterator[StepBatch]:
        """The steps of an epoch, from the given one on."""
        assert self._loader is not None, "closed"
        self._position = (epoch, first_step)
        self._drawn.clear()
        read = self._read(iter(self._loader))
        for step in range(first_step, self.sampler.steps_per_epoch):
            start = time.perf_counter()
            micro_batches = list(itertools.islice(read, self.sampler.num_micro_batches(step)))
            yield StepBatch(micro_batches, self.sampler.step_size(step), time.perf_counter() - start)

    def read_by(self, sampler: Sampler) -> None:
        """Read what another sampler of this data says, from the next call of `steps` on."""
        self.sampler, self._at_once = sampler, None

    def close(self) -> None:
        """End the workers. They ignore the signal by which Python would end them when it exits, and it would wait."""
        # By hand: where a worker has failed, the iterator is in a cycle with the error, and the garbage collector would
        # close its queues before it could tell the workers.
        if self._loader is not None and (iterator := getattr(self._loader, "_iterator", None)) is not None:
            iterator._shutdown_workers()
        self._loader = None

    def _read(self, batches: Iterator[Any]) -> Iterator[MicroBatch]:
        """Share by share, on the device. Raises ValueError for a batch that cannot be cut."""
        while True:
            batch = map_tensors(self._place, self._next(batches))
            shares = self._drawn.popleft()
            if self._reads_ahead and self._at_once is None and shares[0]:
                of_share = num_bytes(batch) * self.sampler.share_size // len(shares[0])  # the first may be smaller
                self._at_once = max(1, min(MOST_AT_ONCE, BYTES_AT_ONCE // max(1, of_share)))
            if len(shares) == 1:
                yield MicroBatch(batch, shares[0])
                continue
            for part, share in zip(split(batch, [len(share) for share in shares]), shares, strict=True):
                yield MicroBatch(part, share)

    def _next(self, batches: Iterator[Any]) -> Any:
        """The next batch. Raises WorkerDied for that of a worker that has ended."""
        try:
            return next(batches)
        except (RuntimeError, OSError, EOFError) as error:  # as it shows itself: torch's word, or a pipe that ends
            if died := death_behind(error, getattr(batches, "_workers", ())):
                raise died from None
            raise

    def _place(self, tensor: torch.Tensor) -> torch.Tensor:
        tensor = self.precision.cast(tensor.to(self.device, non_blocking=True))
        return tensor.contiguous(memory_format=self.memory_format) if tensor.dim() == 4 else tensor


class _Positioned:
    """The sampler's shares from the loader's position on; DataLoader iterates it anew for every epoch.

    Workers are given shares ahead of time: which shares a batch has is kept until it comes, in the same order.
    """

    def __init__(self, loader: Loader):
        self._loader = loader

    def __iter__(self) -> Iterator[Any]:
        loader, (epoch, first_step) = self._loader, self._loader._position
        shares = loader.sampler.shares(epoch, first_step)
        for first in shares:
            together = [first, *itertools.islice(shares, (loader._at_once or 1) - 1)]
            for block in [together] if all(together) else [[share] for share in together]:  # an empty one stands alone
                loader._drawn.append(block)
                yield Share(epoch, list(itertools.chain.from_iterable(block)))


def _begin_worker(worker: int) -> None:
    """A signal to the whole group asks the ranks to save; they need their workers to finish the step."""
    ignore()
    end_at_once_with_parent()
