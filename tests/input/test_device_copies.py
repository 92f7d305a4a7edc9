"""Batches that are copied to a GPU one ahead: their order and values, and errors in their turn.

Streams are imitated, so that no GPU is needed; tests/commands/test_gpu.py has the tests of real ones.
"""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset

from data.tensors import TensorData
from runner.input.device_copies import one_ahead
from runner.input.loader import Loader
from runner.input.pytree import tensors
from runner.input.sampler import Sampler
from runner.input.stream import Stream


def recorded(events: list[str], fails_at: int | None = None) -> Iterator[int]:
    def items() -> Iterator[int]:
        for number in range(3):
            if number == fails_at:
                raise ValueError(f"item {number}")
            events.append(f"read {number}")
            yield number

    def start(number: int) -> Callable[[], int]:
        events.append(f"start {number}")

        def finish() -> int:
            events.append(f"finish {number}")
            return number

        return finish

    return one_ahead(items(), start)


def test_the_next_item_is_started_before_the_current_one_is_used() -> None:
    events = list[str]()
    for number in recorded(events):
        events.append(f"use {number}")
    assert events[:6] == ["read 0", "start 0", "finish 0", "read 1", "start 1", "use 0"]
    assert events[6:] == ["finish 1", "read 2", "start 2", "use 1", "finish 2", "use 2"]


def test_an_error_is_raised_in_its_turn() -> None:
    events = list[str]()
    items = recorded(events, fails_at=1)
    assert next(items) == 0
    with pytest.raises(ValueError, match="item 1"):
        next(items)


def test_a_started_item_is_finished_if_the_iteration_ends_early() -> None:
    events = list[str]()
    items = recorded(events)
    assert next(items) == 0
    items.close()  # type: ignore[attr-defined]
    assert events[-2:] == ["start 1", "finish 1"]
    failing = recorded(events, fails_at=1)
    assert next(failing) == 0
    failing.close()  # type: ignore[attr-defined]


class Images(IterableDataset[Any]):
    """A stream of unknown length: images in bytes, complex numbers, and a transposed matrix of float32."""

    def __iter__(self) -> Iterator[Any]:
        for number in range(21):
            image, matrix = torch.full((2, 3, 3), number, dtype=torch.uint8), torch.arange(6.0).view(2, 3) + number
            yield {"image": image / 7, "bytes": image, "complex": torch.tensor(1j * number), "matrix": matrix.T}


def make_loader(kind: str) -> Loader:
    images = torch.rand(23, 2, 3, 3, generator=torch.Generator().manual_seed(0))
    data: Any = Stream(Images()) if kind == "stream" else TensorData(images, torch.arange(23))
    sampler = Sampler(len(data), 4, 2, data_rank=1, data_ranks=2, seed=3)
    return Loader(data, sampler, torch.float64, torch.device("cpu"), torch.channels_last)


def steps_of(loader: Loader, epoch: int, first: int = 0) -> list[Any]:
    loader.checksum_steps = 3
    return [(step, loader.stream_position) for step in loader.steps(epoch, first)]


@pytest.mark.parametrize("kind", ["stream", "in memory"])
def test_batches_that_are_copied_ahead_equal_the_others(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = SimpleNamespace(wait_stream=lambda _: None, record_event=lambda: "done", wait_event=lambda _: None)
    for name, imitated in (("Stream", lambda _: stream), ("current_stream", lambda _: stream)):
        monkeypatch.setattr(torch.cuda, name, imitated)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    copying, other = make_loader(kind), make_loader(kind)
    copying.copies_ahead = True
    for epoch, first in ((0, 0), (1, 2)):
        pairs = zip(steps_of(copying, epoch, first), steps_of(other, epoch, first), strict=True)
        for (found, position), (expected, expected_position) in pairs:
            assert position == expected_position and found.ends_epoch == expected.ends_epoch
            assert (found.num_samples, found.checksum) == (expected.num_samples, expected.checksum)
            for one, two in zip(found.micro_batches, expected.micro_batches, strict=True):
                assert one.indices == two.indices
                for tensor, same in zip(tensors(one.data), tensors(two.data), strict=True):
                    assert tensor.dtype == same.dtype and torch.equal(tensor, same)
                    assert tensor.dim() != 4 or tensor.is_contiguous(memory_format=torch.channels_last)
    ahead = copying.steps(2)
    next(ahead)
    ahead.close()  # type: ignore[attr-defined]
