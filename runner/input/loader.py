"""Batches of a dataset on this rank's device, step by step."""

import errno
import itertools
import re
import resource
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing.connection import wait
from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader, get_worker_info

from runner.distributed.failures.signals import exit_at_once_with_parent, ignore_signals
from runner.distributed.machine import LARGER, can_open, check_open_files, check_shared_memory
from runner.errors import JobFailed
from runner.input.batch import MicroBatch, StepBatch, cast_floating
from runner.input.device_copies import DeviceCopies, one_ahead
from runner.input.device_samples import DeviceSamples
from runner.input.pytree import map_tensors, split, tensors
from runner.input.sample_weights import read_sample_weights
from runner.input.sampler import Sampler
from runner.input.source import Source
from runner.input.stream import Position, StepReader, Stream, until_last

T = TypeVar("T")
# Limits of what is read at once from a dataset with `reads_ahead`: local micro-batches, and bytes of their samples.
MOST_AT_ONCE, BYTES_AT_ONCE = 16, 8 * 2**20
EXIT_S = 1.0  # timeout for a worker to exit after its connection is lost
# Open files that DataLoader needs for itself and for each worker, and those of some batches of two tensors.
FILES, FILES_PER_WORKER, FILES_OF_BATCHES = 2, 4, 16
# In messages of torch and multiprocessing if a process cannot open the file of a tensor.
_NO_FILE = re.compile(r"Too many open files|received \d+ items of ancdata")


class _TooFewFiles(RuntimeError):
    """A worker that cannot open the files of a batch."""


class Loader:
    """Reads the samples that the sampler selects, in this process or in workers, and moves them to the device.

    If the dataset `reads_ahead` and there are no workers, several local micro-batches are read at once and then split.
    A local micro-batch without samples has one that is not counted. With a GPU, the next read is copied to it while the
    current one is used, unless the samples are kept there.
    """

    def __init__(
        self,
        dataset: Any,
        sampler: Sampler,
        dtype: torch.dtype,
        device: torch.device,
        memory_format: torch.memory_format = torch.contiguous_format,
        num_workers: int = 0,
        pin_memory: bool | None = None,
        drop_last: bool = False,
        shuffle: bool = True,
        prefetch: int | None = None,
        weights: str | None = None,
        timeout_s: float | None = None,
    ):
        _check_options(num_workers, prefetch, timeout_s)
        if weights is not None and not shuffle:
            raise ValueError(f"loader.shuffle=false has no effect with loader.weights={weights}; leave one of them out")
        self.dataset = source = dataset if isinstance(dataset, Source) else Source.of(dataset)
        self.is_stream = isinstance(source.dataset, Stream)
        if self.is_stream and weights is not None:
            raise ValueError(f"loader.weights={weights} needs a map-style dataset, and the data is a stream")
        if self.is_stream and drop_last and not source.has_length:
            raise ValueError("loader.drop_last=true needs a stream with a length; define __len__, or leave it out")
        blocks: dict[str, Any] = {name: getattr(source, name, None) for name in ("block_ends", "window")}
        drawn = None if weights is None else read_sample_weights(weights, source)
        shuffles = shuffle and not self.is_stream
        splits = self.is_stream and source.dataset.can_split
        sampler = replace(sampler, shuffle=shuffles, drop_last=drop_last, weights=drawn, interleaves=splits, **blocks)
        if sampler.steps_per_epoch == 0:
            raise ValueError(
                f"loader.drop_last=true with batch_size={sampler.batch_size} leaves no step of the data's "
                f"{sampler.num_samples} samples; try batch_size={sampler.num_samples}"
            )
        self.sampler, self.dtype, self.device, self.memory_format = sampler, dtype, device, memory_format
        self.seed, self.num_workers = sampler.seed, num_workers
        self.checksum_steps = 0  # steps of the first epoch whose samples are hashed
        self._position = (0, 0)
        self.stream_position = Position()  # after the last step that was read, or of the loaded checkpoint
        # For each batch that is requested and not yet read: the indices of its local micro-batches.
        self._requested: deque[list[list[int]]] = deque()
        self._reads_ahead = num_workers == 0 and source.reads_ahead
        self._at_once: int | None = None  # local micro-batches; determined from the size of the first one
        self._timeout_s = timeout_s
        self.copies_ahead = device.type == "cuda" and not isinstance(source.cache, DeviceSamples)
        self._copies: DeviceCopies | None = None
        reader: Any = StepReader(source) if self.is_stream else source
        self._loader: DataLoader[Any] | None = DataLoader(
            reader,
            batch_sampler=self,  # any iterable is permitted
            num_workers=num_workers,
            collate_fn=_share_in_worker,
            pin_memory=self.copies_ahead if pin_memory is None else pin_memory,
            prefetch_factor=prefetch or 2 if num_workers else None,
            persistent_workers=num_workers > 0,
            timeout=timeout_s or 0.0 if num_workers else 0.0,
            worker_init_fn=_start_worker,
            # DataLoader draws the base seed of its workers from here: the global stream is reserved for the model.
            generator=torch.Generator().manual_seed(sampler.seed),
        )

    def steps(self, epoch: int, first_step: int = 0) -> Iterator[StepBatch]:
        """Yield the steps of an epoch, starting with `first_step`. Raise ValueError if a stream has no more samples."""
        assert self._loader is not None, "closed"
        self._position = (epoch, first_step)
        self._requested.clear()
        batches = self._naming_workers(iter(self._loader))
        streamed = self._on_device((each.batches, each) for each in until_last(batches))
        micro_batches = self._read(self._on_device(batches))
        blocks = self.sampler.blocks_ahead(epoch, first_step)
        for step in range(first_step, self.sampler.steps_per_epoch):
            start, is_last = time.perf_counter(), step + 1 == self.sampler.steps_per_epoch
            self.dataset.copy_ahead(next(blocks, []))
            checksums: list[float] = []
            if self.is_stream:
                copied, samples = next(streamed)
                if samples.num_samples == 0:
                    raise ValueError(f"epoch {epoch + 1} of the stream has no samples after step {step}")
                of_step = [MicroBatch(*each) for each in zip(copied, samples.indices, strict=True)]
                num_samples, is_last = samples.num_samples, is_last or samples.is_last
                checksums = samples.checksums
                self.stream_position = samples.position
            else:
                of_step = []
                for micro_batch, of_samples in itertools.islice(micro_batches, self.sampler.num_micro_batches(step)):
                    of_step.append(micro_batch)
                    checksums += of_samples
                num_samples = self.sampler.step_size(step)
            checksum = sum(checksums) if self._is_hashed(epoch, step) else None
            yield StepBatch(of_step, num_samples, time.perf_counter() - start, is_last, checksum)
            if is_last:
                return

    def batches_at_once(self, num_bytes: int) -> int:
        """Return how many local micro-batches of this size are read at once."""
        return max(1, min(MOST_AT_ONCE, BYTES_AT_ONCE // max(1, num_bytes))) if self._reads_ahead else 1

    def use_sampler(self, sampler: Sampler) -> None:
        """Replace the sampler for all further calls of `steps`."""
        self.sampler, self._at_once = sampler, None

    def close(self) -> None:
        """Stop the workers. They ignore the SIGTERM that Python sends at exit, so that Python would wait forever."""
        # Explicitly: if a worker has failed, the iterator is in a reference cycle with the error, and the garbage
        # collector might close its queues before it notifies the workers.
        if self._loader is not None and (iterator := getattr(self._loader, "_iterator", None)) is not None:
            iterator._shutdown_workers()
            for worker in getattr(iterator, "_workers", ()):
                worker.kill()  # if it hangs
        self._loader = None

    def _naming_workers(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield the batches. Raise RuntimeError that names exited workers or a timeout, JobFailed without /dev/shm."""
        try:
            yield from batches
        except (RuntimeError, OSError, EOFError) as error:
            if "unable to allocate shared memory" in str(error):
                reason = "/dev/shm has no space for the batches of the workers"
                raise JobFailed(f"loader.num_workers: {reason}; mount it larger, {LARGER}, or use fewer") from None
            # It is an OSError if a tensor of an exited worker cannot be received.
            workers = getattr(batches, "_workers", ())
            if isinstance(error, (OSError, EOFError)):
                exiting = wait([each.sentinel for each in workers], EXIT_S)
                for worker in (each for each in workers if each.sentinel in exiting):
                    worker.join(EXIT_S)
            exited = [each for each in workers if each.exitcode is not None]
            states = [f"DataLoader worker (pid {each.pid}) {_describe_exit(each.exitcode)}" for each in exited]
            if not states and _is_without_files(error):
                limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
                reason = f"a batch cannot be received, because the limit of open files is {limit} (ulimit -n)"
                raise JobFailed(f"loader.num_workers: {reason}; raise it, or use fewer workers") from None
            if not states and "DataLoader timed out" not in str(error):
                raise
            late = f"the DataLoader workers returned no batch within loader.timeout_s={self._timeout_s} s"
            raise RuntimeError("; ".join(states) or late) from error

    def _is_hashed(self, epoch: int, step: int) -> bool:
        return epoch == 0 and step < self.checksum_steps

    def _on_device(self, read: Iterator[tuple[Any, T]]) -> Iterator[tuple[Any, T]]:
        """Yield the data on the device, and what was read with it."""
        if not self.copies_ahead:
            for data, rest in read:
                yield map_tensors(self.to_device, data), rest
            return
        copies = self._copies = self._copies or DeviceCopies(self.device)

        def start(each: tuple[Any, T]) -> Callable[[], tuple[Any, T]]:
            finish = copies.start(each[0], self.dtype, self.memory_format)
            return lambda: (finish(), each[1])

        yield from one_ahead(read, start)

    def _read(self, batches: Iterator[tuple[Any, list[float]]]) -> Iterator[tuple[MicroBatch, list[float]]]:
        """Yield local micro-batches, and the checksums of their samples if they were requested.

        Raise ValueError if a batch that was read ahead cannot be split.
        """
        for batch, checksums in batches:
            requested = self._requested.popleft()
            if self._at_once is None and requested[0]:
                num_bytes = sum(tensor.nbytes for tensor in tensors(batch))
                largest = num_bytes * self.sampler.local_size // len(requested[0])  # the first may be smaller
                self._at_once = self.batches_at_once(largest)
            if len(requested) == 1:
                yield MicroBatch(batch, requested[0]), checksums
                continue
            for part, indices in zip(split(batch, [len(each) for each in requested]), requested, strict=True):
                yield MicroBatch(part, indices), checksums[: len(indices)]
                checksums = checksums[len(indices) :]

    def __iter__(self) -> Iterator[Any]:
        """Yield the arguments of each read from the current position on. DataLoader iterates over them once per epoch.

        DataLoader requests batches before they are needed, and returns them in the order of the requests.
        """
        epoch, first_step = self._position
        if self.is_stream:
            start = self.stream_position if first_step else None
            for step in range(first_step, self.sampler.steps_per_epoch):  # if it has no length, also after its end
                yield self._is_hashed(epoch, step), step, epoch, self.sampler, start
            return
        steps = range(first_step, min(self.checksum_steps, self.sampler.steps_per_epoch))
        num_hashed = sum(self.sampler.num_micro_batches(step) for step in steps if self._is_hashed(epoch, step))
        local_batches = self.sampler.local_batches(epoch, first_step)
        for first in local_batches:
            together = [first, *itertools.islice(local_batches, (self._at_once or 1) - 1)]
            # An empty local micro-batch cannot be split from others.
            for block in [together] if all(together) else [[indices] for indices in together]:
                self._requested.append(block)
                yield num_hashed > 0, list(itertools.chain.from_iterable(block)), epoch, self.seed
                num_hashed -= len(block)

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor of a batch on the device, in the dtype and memory format of the model."""
        tensor = cast_floating(tensor.to(self.device, non_blocking=True), self.dtype)
        return tensor.contiguous(memory_format=self.memory_format) if tensor.dim() == 4 else tensor


def _check_options(num_workers: int, prefetch: int | None, timeout_s: float | None) -> None:
    """Raise ValueError for a number out of its range, or if workers could not share batches."""
    if num_workers < 0:
        raise ValueError(f"loader.num_workers={num_workers} must be at least 0")
    if num_workers:
        check_shared_memory(option := f"loader.num_workers={num_workers}")
        # The loaders of training and of evaluation keep their workers.
        check_open_files(option, 2 * (FILES + FILES_PER_WORKER * num_workers) + FILES_OF_BATCHES)
    if prefetch is not None and prefetch < 1:
        raise ValueError(f"loader.prefetch={prefetch} must be at least 1, or null")
    if timeout_s is not None and timeout_s <= 0:
        raise ValueError(f"loader.timeout_s={timeout_s:g} must be above 0 seconds, or null")


def _share_in_worker(batch: Any) -> Any:
    """In a worker, move the batch to shared memory, if it can be sent: the thread that sends it would lose an error.

    Each tensor is a file, whose descriptor is copied in order to send it.
    """
    if get_worker_info() is None:
        return batch
    if not can_open(2 * len(tensors(batch)) + FILES_PER_WORKER):
        raise _TooFewFiles
    return map_tensors(torch.Tensor.share_memory_, batch)


def _is_without_files(error: Exception) -> bool:
    """Return True if the limit of open files is the cause of an error that is raised while a batch is received."""
    if isinstance(error, (_TooFewFiles, EOFError)):  # a process that cannot accept a connection closes it
        return True
    of_dataset = "in DataLoader worker process" in str(error)
    return getattr(error, "errno", None) == errno.EMFILE or bool(not of_dataset and _NO_FILE.search(str(error)))


def _describe_exit(status: int) -> str:
    if status < 0:
        return f"is killed by signal {signal.Signals(-status).name}"
    return f"exited unexpectedly with status {status}"


def _start_worker(worker: int) -> None:
    """Ignore signals. A signal to the process group requests a checkpoint, and workers must first finish the step."""
    ignore_signals()
    exit_at_once_with_parent()
