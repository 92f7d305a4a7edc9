"""Streams: samples of an IterableDataset, selected by position in the same order for any number of ranks."""

import base64
import copy
import io
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch.utils.data._utils import worker

from runner.input.rng import EPOCH, SAMPLE, derive_seed, isolated, seed_all, seeded
from runner.input.sampler import Sampler

UNKNOWN_LENGTH = 2**62  # the length of a stream whose dataset has no __len__


class Position(NamedTuple):
    """The number of samples before a position in a stream, and the state_dict of the dataset there, if it has one."""

    samples: int = 0
    state: Any = None


class Stream:
    """A dataset that selects the samples of an IterableDataset by position; efficient only for increasing positions.

    Every reader iterates over the whole stream, so all of them agree on positions and on the end without
    communication. Only the reader that uses a sample decodes it, if the dataset defines `decode`. Random numbers that
    the dataset draws for a sample depend only on the seed, the epoch and the position.
    """

    def __init__(self, iterable: Any):
        self.iterable = iterable
        self._length = UNKNOWN_LENGTH
        if hasattr(iterable, "__len__"):
            with suppress(TypeError, NotImplementedError):  # torch permits a __len__ that raises
                self._length = len(iterable)
        self.has_length = self._length != UNKNOWN_LENGTH
        self.is_stateful = hasattr(iterable, "state_dict") and hasattr(iterable, "load_state_dict")
        self._key = (0, 0)  # epoch, and a number that depends on epoch and seed
        self._opened_by: int | None = None  # process; two processes must not read from the same open file
        self._position = 0  # of the next sample that is taken
        self._ahead: list[Any] = []  # a sample that was read only to detect the end of the stream
        self._first, self._window = 0, list[Any]()  # the samples of the last `load`, not decoded

    def __len__(self) -> int:
        return self._length

    def __getattr__(self, name: str) -> Any:
        if name == "iterable" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.iterable, name)

    def __reduce__(self) -> Any:
        return Stream, (self.iterable,)

    def in_epoch(self, epoch: int) -> "Stream":
        """Select an epoch. Its seed is drawn from torch's generator, which the caller has seeded."""
        key = (epoch, int(torch.randint(2**62, ())))
        if key != self._key:
            self._key, self._opened_by = key, None
        return self

    def __getitem__(self, position: int) -> Any:
        if not self._first <= position < self._first + len(self._window) or self._opened_by != os.getpid():
            self.load(position, 1)
        if not self._window:
            raise IndexError(f"the stream has no sample {position}")
        sample = self._window[position - self._first]
        return self.iterable.decode(sample) if hasattr(self.iterable, "decode") else sample

    def load(self, first: int, count: int, start: Position | None = None) -> tuple[int, Any, bool]:
        """Read `count` samples from position `first` on, so that `__getitem__` can return them.

        Return their number, which is less than `count` at the end of the stream, the dataset's state after them, and
        whether the stream ends there. If `start` has a state and is not after `first`, a new iteration starts there.
        Raise ValueError if the stream is shorter than its length.
        """
        expected = min(count, len(self) - first)
        with _hidden_worker(), isolated():
            if start is None or start.state is None or start.samples > first:
                start = Position()
            if self._opened_by != os.getpid() or not start.samples <= self._position <= first:
                self._open(start)
            while self._position < first and self._take(1):
                pass
            self._first, self._window = first, self._take(expected)
            found, state = len(self._window), None
            if self.is_stateful:
                state = copy.deepcopy(self._dataset.state_dict())
            if self.has_length:
                if found < expected:
                    raise ValueError(
                        f"the stream ended after {self._position:,} samples, but its length is {len(self):,}; correct "
                        "__len__, or leave it out"
                    )
                return found, state, first + found == len(self)
            if found == expected:
                self._ahead = self._take(1)
                self._position -= len(self._ahead)
        return found, state, not self._ahead

    def _open(self, start: Position) -> None:
        """Start an iteration on a copy, because an iteration may change the dataset, and objects in it."""
        with seeded(*self._key, EPOCH):
            try:
                dataset = copy.deepcopy(self.iterable)
            except Exception:  # it contains an object that cannot be copied, such as an open file
                dataset = copy.copy(self.iterable)
            self._dataset = dataset.in_epoch(self._key[0]) if hasattr(dataset, "in_epoch") else dataset
            if start.samples:
                self._dataset.load_state_dict(copy.deepcopy(start.state))
            self._samples = iter(self._dataset)
        self._opened_by, self._ahead, self._position = os.getpid(), [], start.samples

    def _take(self, count: int) -> list[Any]:
        """Return the next samples; fewer at the end of the stream."""
        taken, self._ahead = self._ahead[:count], self._ahead[count:]
        while len(taken) < count:
            seed_all(derive_seed(*self._key, self._position + len(taken), SAMPLE))
            try:
                taken.append(next(self._samples))
            except StopIteration:
                break
        self._position += len(taken)
        return taken


class StepSamples(NamedTuple):
    """The local micro-batches of a step."""

    batches: list[Any]
    indices: list[list[int]]
    num_samples: int  # over all ranks; 0 after the end of the stream
    position: Position  # after the step
    is_last: bool
    checksums: list[float]  # of this rank's samples; empty unless requested


class StepReader:
    """A dataset from which DataLoader reads whole steps. Any worker can read any step."""

    def __init__(self, source: Any):
        self.source = source  # of a Stream

    def __getitems__(self, request: tuple[bool, int, int, Sampler, Position | None]) -> StepSamples:
        is_hashed, step, epoch, sampler, start = request  # start: where the epoch is resumed; None: position 0
        stream: Stream = self.source.dataset
        first = step * sampler.batch_size
        with seeded(sampler.seed, epoch, EPOCH):
            stream.in_epoch(epoch)
        found, state, is_last = stream.load(first, sampler.batch_size, start)
        position = Position(first + found, state)
        if not found:
            return StepSamples([], [], 0, position, True, [])
        parts = [list(part) for part in replace(sampler, num_samples=first + found).positions(step)]
        batches, checksums = [], list[float]()
        for part in parts:
            of_part: list[float] | None = [] if is_hashed else None
            batches.append(self.source.read(part, epoch, sampler.seed, first, of_part))
            checksums += of_part or []
        return StepSamples(batches, parts, found, position, is_last, checksums)


def encode_state(state: Any) -> str:
    """Return a state_dict as text for a checkpoint."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return base64.b64encode(buffer.getvalue()).decode()


def decode_state(encoded: str) -> Any:
    """Return an encoded state_dict. Raise an exception for types that could run code."""
    return torch.load(io.BytesIO(base64.b64decode(encoded)), weights_only=True)


@contextmanager
def _hidden_worker() -> Iterator[None]:
    """Hide the loader worker: a dataset that splits itself among the workers would lose samples of the stream."""
    info, worker._worker_info = worker._worker_info, None
    try:
        yield
    finally:
        worker._worker_info = info
