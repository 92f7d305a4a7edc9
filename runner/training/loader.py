"""Batches of a data set on this rank's device, step by step."""

import signal
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, default_collate

from runner.training.batch import MicroBatch, StepBatch
from runner.training.precision import Precision
from runner.training.sampler import Sampler


class Loader:
    """Reads what the sampler says, in this process or by workers, and puts it on the device."""

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
    ):
        if num_workers < 0:
            raise ValueError(f"loader.num_workers={num_workers} must be at least 0")
        if prefetch is not None and prefetch < 1:
            raise ValueError(f"loader.prefetch={prefetch} must be at least 1, or null")
        sampler = replace(sampler, shuffle=shuffle, drop_last=drop_last)
        if sampler.steps_per_epoch == 0:
            raise ValueError(
                f"loader.drop_last=true with batch_size={sampler.batch_size} leaves no step of the data's "
                f"{sampler.num_samples} samples; try batch_size={sampler.num_samples}"
            )
        self.sampler, self.precision, self.device, self.memory_format = sampler, precision, device, memory_format
        self.dataset = dataset
        self._position = (0, 0)
        self._drawn: deque[list[int]] = deque()  # the shares that were asked for and are not yielded yet
        self._batched = hasattr(dataset, "__getitems__")
        self._loader: DataLoader[Any] | None = DataLoader(
            dataset,
            batch_sampler=_Positioned(self),  # any iterable of index lists will do
            num_workers=num_workers,
            collate_fn=_keep if self._batched else _Collate(dataset),
            pin_memory=device.type == "cuda" if pin_memory is None else pin_memory,
            prefetch_factor=prefetch or 2 if num_workers else None,
            persistent_workers=num_workers > 0,
            worker_init_fn=_ignore_signals,
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
            micro_batches = [self._to_device(*next(batches)) for _ in range(self.sampler.num_micro_batches(step))]
            yield StepBatch(micro_batches, self.sampler.step_size(step), time.perf_counter() - start)

    def close(self) -> None:
        """End the workers. They ignore the signal by which Python would end them when it exits, and it would wait."""
        self._loader = None

    def _to_device(self, inputs: torch.Tensor, targets: torch.Tensor) -> MicroBatch:
        inputs = self.precision.cast(inputs.to(self.device, non_blocking=True))
        if inputs.dim() == 4:
            inputs = inputs.contiguous(memory_format=self.memory_format)
        targets = self.precision.cast(targets.to(self.device, non_blocking=True))
        return MicroBatch(inputs, targets, self._drawn.popleft())


class _Positioned:
    """The sampler's shares from the loader's position on; DataLoader iterates it anew for every epoch.

    Workers are given shares ahead of time: which indices a batch has is kept until it comes, in the same order.
    """

    def __init__(self, loader: Loader):
        self._loader = loader

    def __iter__(self) -> Iterator[list[int]]:
        for share in self._loader.sampler.shares(*self._loader._position):
            self._loader._drawn.append(share)
            yield share


def _keep(batch: Any) -> Any:
    """A data set that cuts whole batches (`__getitems__`) has collated them."""
    return batch


class _Collate:
    """Collate samples read one by one; an empty share has the shape of the data's first sample."""

    def __init__(self, dataset: Any):
        self._dataset = dataset

    def __call__(self, samples: list[Any]) -> Any:
        if samples:
            return default_collate(samples)
        inputs, targets = default_collate([self._dataset[0]])
        return inputs[:0], targets[:0]


def _ignore_signals(worker: int) -> None:
    """A signal to the whole group asks the ranks to save; they need their workers to finish the step."""
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
