"""Streams: samples of an IterableDataset, selected by position in the same order for any number of ranks."""

import base64
import copy
import io
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch.utils.data._utils import worker

from runner.input.checksum import sample_checksum
from runner.input.rng import EPOCH, SAMPLE, derive_seed, isolated, seed_all, seeded
from runner.input.sampler import Sampler

SPLIT_RULE = "split(index, count) must yield the samples at the positions p with p % count == index, in their order"
UNKNOWN_LENGTH = 2**62  # the length of a stream whose dataset has no __len__


class Position(NamedTuple):
    """The number of samples before a position in a stream, and the state_dict of the dataset there, if it has one."""

    samples: int = 0
    state: Any = None


class Stream:
    """A dataset that selects the samples of an IterableDataset by position; efficient only for increasing positions.

    Without `split`, every reader iterates over the whole stream, so all of them agree on positions and on the end
    without communication. With it, a reader iterates over one part: the samples at the positions p with
    p % count == index. Only the reader that uses a sample decodes it, if the dataset defines `decode`. Random numbers
    that the dataset draws for a sample depend only on the seed, the epoch and the position.
    """

    def __init__(self, iterable: Any, key: tuple[int, int] = (0, 0)):
        self.iterable = iterable
        self._length = UNKNOWN_LENGTH
        if hasattr(iterable, "__len__"):
            with suppress(TypeError, NotImplementedError):  # torch permits a __len__ that raises
                self._length = len(iterable)
        self.has_length = self._length != UNKNOWN_LENGTH
        self.is_stateful = hasattr(iterable, "state_dict") and hasattr(iterable, "load_state_dict")
        # Some datasets store the name of their split in an attribute `split`.
        self.can_split = callable(getattr(iterable, "split", None))
        self._part = (0, 1)  # index and count
        self._total: int | None = None  # samples of all parts in this epoch, once counted
        self._whole: Stream | None = None  # reads samples of other parts, in this epoch
        self._key = key  # epoch, and a number that depends on epoch and seed
        self._opened_by: int | None = None  # process; two processes must not read from the same open file
        self._position = 0  # of the next sample that is taken, in the part
        self._ahead: list[Any] = []  # a sample that was read only to detect the end of the stream
        # The samples of the last `load`, not decoded; `_first` is a position in the part.
        self._first, self._window = 0, list[Any]()

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
            self._key, self._opened_by, self._whole, self._total = key, None, None, None
        return self

    def use_part(self, index: int, count: int) -> None:
        """Select the part that `load` reads. A part other than (0, 1) needs a dataset with `split`."""
        if self._part != (index, count):
            self._part, self._opened_by = (index, count), None

    def __getitem__(self, position: int) -> Any:
        in_part, index = divmod(position, self._part[1])
        if index != self._part[0]:
            return self._read_whole()[position]
        if not self._first <= in_part < self._first + len(self._window) or self._opened_by != os.getpid():
            self.load(position, 1)
        if not self._window:
            raise IndexError(f"the stream has no sample {position}")
        sample = self._window[in_part - self._first]
        return self.iterable.decode(sample) if hasattr(self.iterable, "decode") else sample

    def load(self, first: int, count: int, start: Position | None = None) -> tuple[int, Any, bool]:
        """Read those of `count` samples from position `first` on that are in the part, for `__getitem__`.

        Return the number of the samples in all parts, which is less than `count` at the end of the stream, the
        dataset's state after them, and whether the stream ends there. If `start` has a state and is not after `first`,
        a new iteration starts there. A part has no state, because another number of parts could not load it. Raise
        ValueError if the stream is shorter than its length, or the part than its share of the stream.
        """
        expected = max(0, min(count, len(self) - first))
        index, num_parts = self._part
        positions = range(first + (index - first) % num_parts, first + expected, num_parts)
        in_part = positions.start // num_parts
        with _hidden_worker(), isolated():
            if start is None or start.state is None or start.samples > first or num_parts > 1:
                start = Position()
            if self._opened_by != os.getpid() or not start.samples <= self._position <= in_part:
                self._open(start)
            while self._position < in_part and self._take(1):
                pass
            self._first, self._window = in_part, self._take(len(positions))
            is_complete, state = len(self._window) == len(positions), None
            if self.is_stateful and num_parts == 1:
                state = copy.deepcopy(self._dataset.state_dict())
            if self.has_length:
                if not is_complete:
                    part = "the stream" if num_parts == 1 else f"split({index}, {num_parts})"
                    raise ValueError(
                        f"{part} ended after {self._position:,} samples, but the stream's length is {len(self):,}; "
                        "correct __len__, or leave it out"
                    )
                return expected, state, first + expected == len(self)
            if is_complete:
                self._ahead = self._take(1)
                self._position -= len(self._ahead)
            if self._ahead:  # the stream has all samples before this one
                return expected, state, False
            total = self._position if num_parts == 1 else self._count_whole()
        return max(0, min(expected, total - first)), state, first + expected >= total

    def _read_whole(self) -> "Stream":
        """Return a reader of all parts in this epoch."""
        if self._whole is None:
            self._whole = Stream(self.iterable, self._key)
        return self._whole

    def _count_whole(self) -> int:
        """Return the number of samples in all parts after this part has ended. Raise ValueError if that is impossible.

        All ranks count the same number, without communication, in one iteration over the whole stream per epoch.
        """
        index, num_parts = self._part
        if self._total is None:
            self._total = Stream(self.iterable, self._key).count(self._position * num_parts + index + 1)
        if self._position != len(range(index, self._total, num_parts)):
            raise ValueError(
                f"split({index}, {num_parts}) ended after {self._position:,} samples, but the stream has at least "
                f"{self._total:,}; {SPLIT_RULE}"
            )
        return self._total

    def count(self, most: int) -> int:
        """Return the number of samples of the part, or `most` if it has more."""
        with _hidden_worker(), isolated():
            self._open(Position())
            while self._position < most and self._take(1):
                pass
        return self._position

    def find_wrong_split(self, count: int) -> str | None:
        """Return why the first samples of a part are not those of the stream, or None if they are."""
        whole = self._read_whole()
        for index in sorted({0, 1, count - 1}):
            part = Stream(self.iterable)
            part.use_part(index, count)
            for position in (index, index + count):
                if _differs(part, whole, position):
                    return f"split({index}, {count}) does not return the sample at position {position}; {SPLIT_RULE}"
        return None

    def _open(self, start: Position) -> None:
        """Start an iteration on a copy, because an iteration may change the dataset, and objects in it."""
        with seeded(*self._key, EPOCH):
            try:
                dataset = copy.deepcopy(self.iterable)
            except Exception:  # it contains an object that cannot be copied, such as an open file
                dataset = copy.copy(self.iterable)
            self._dataset = dataset.in_epoch(self._key[0]) if hasattr(dataset, "in_epoch") else dataset
            if self._part[1] > 1:
                self._dataset = self._dataset.split(*self._part)
            if start.samples:
                self._dataset.load_state_dict(copy.deepcopy(start.state))
            self._samples = iter(self._dataset)
        self._opened_by, self._ahead, self._position = os.getpid(), [], start.samples

    def _take(self, count: int) -> list[Any]:
        """Return the next samples; fewer at the end of the stream."""
        taken, self._ahead = self._ahead[:count], self._ahead[count:]
        while len(taken) < count:
            index, num_parts = self._part
            position = (self._position + len(taken)) * num_parts + index
            seed_all(derive_seed(*self._key, position, SAMPLE))
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
        if sampler.interleaves:
            stream.use_part(sampler.data_rank or 0, sampler.data_ranks)
        found, state, is_last = stream.load(first, sampler.batch_size, start)
        position = Position(first + found, state)
        if not found:
            return StepSamples([], [], 0, position, True, [])
        parts = [list(part) for part in replace(sampler, num_samples=first + found).positions(step)]
        batches, checksums = [], list[float]()
        stand_in = next((part[0] for part in parts if part), 0) if sampler.interleaves else first
        for part in parts:
            of_part: list[float] | None = [] if is_hashed else None
            batches.append(self.source.read(part, epoch, sampler.seed, stand_in, of_part))
            checksums += of_part or []
        return StepSamples(batches, parts, found, position, is_last, checksums)


def until_last(steps: Iterator[StepSamples]) -> Iterator[StepSamples]:
    """Yield the steps of an epoch. The steps after the last one, which has no samples, are not read."""
    for samples in steps:
        yield samples
        if samples.is_last:
            return


def encode_state(state: Any) -> str:
    """Return a state_dict as text for a checkpoint."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return base64.b64encode(buffer.getvalue()).decode()


def decode_state(encoded: str) -> Any:
    """Return an encoded state_dict. Raise an exception for types that could run code."""
    return torch.load(io.BytesIO(base64.b64decode(encoded)), weights_only=True)


def _differs(part: Stream, whole: Stream, position: int) -> bool:
    """Return True if the readers do not have the same sample at a position. NaN, an unknown checksum, is equal."""
    checksums = []
    for stream in (part, whole):
        with seeded(position):
            checksums.append(sample_checksum(stream[position]) if stream.load(position, 1)[0] else -1.0)
    return checksums[0] != checksums[1] and not any(map(math.isnan, checksums))


@contextmanager
def _hidden_worker() -> Iterator[None]:
    """Hide the loader worker: a dataset that splits itself among the workers would lose samples of the stream."""
    info, worker._worker_info = worker._worker_info, None
    try:
        yield
    finally:
        worker._worker_info = info
