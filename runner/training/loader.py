"""Batches of a data set on this rank's device, step by step."""

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
from runner.training.pytree import map_tensors
from runner.training.reader import Reader, Share
from runner.training.sample_weights import read_weights
from runner.training.sampler import Sampler


class Loader:
    """Reads what the sampler says, in this process or by workers, and puts it on the device.

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
        self._drawn: deque[list[int]] = deque()  # the shares that were asked for and are not yielded yet
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
        batches = iter(self._loader)
        for step in range(first_step, self.sampler.steps_per_epoch):
            start = time.perf_counter()
            micro_batches = [self._to_device(self._next(batches)) for _ in range(self.sampler.num_micro_batches(step))]
            yield StepBatch(micro_batches, self.sampler.step_size(step), time.perf_counter() - start)

    def read_by(self, sampler: Sampler) -> None:
        """Read what another sampler of this data says, from the next call of `steps` on."""
        self.sampler = sampler

    def close(self) -> None:
        """End the workers. They ignore the signal by which Python would end them when it exits, and it would wait."""
        # By hand: where a worker has failed, the iterator is in a cycle with the error, and the garbage collector would
        # close its queues before it could tell the workers.
        if self._loader is not None and (iterator := getattr(self._loader, "_iterator", None)) is not None:
            iterator._shutdown_workers()
        self._loader = None

    def _next(self, batches: Iterator[Any]) -> Any:
        """The next batch. Raises WorkerDied for that of a worker that has ended."""
        try:
            return next(batches)
        except (RuntimeError, OSError, EOFError) as error:  # as it shows itself: torch's word, or a pipe that ends
            if died := death_behind(error, getattr(batches, "_workers", ())):
                raise died from None
            raise

    def _to_device(self, batch: Any) -> MicroBatch:
        return MicroBatch(map_tensors(self._place, batch), self._drawn.popleft())

    def _place(self, tensor: torch.Tensor) -> torch.Tensor:
        tensor = self.precision.cast(tensor.to(self.device, non_blocking=True))
        return tensor.contiguous(memory_format=self.memory_format) if tensor.dim() == 4 else tensor


class _Positioned:
    """The sampler's shares from the loader's position on; DataLoader iterates it anew for every epoch.

    Workers are given shares ahead of time: which indices a batch has is kept until it comes, in the same order.
    """

    def __init__(self, loader: Loader):
        self._loader = loader

    def __iter__(self) -> Iterator[Any]:
        epoch, first_step = self._loader._position
        for indices in self._loader.sampler.shares(epoch, first_step):
            self._loader._drawn.append(indices)
            yield Share(epoch, indices)


def _begin_worker(worker: int) -> None:
    """A signal to the whole group asks the ranks to save; they need their workers to finish the step."""
    ignore()
    end_at_once_with_parent()
