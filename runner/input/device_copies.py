"""Copies of batches to a GPU while it computes the step before: one batch ahead, on a stream of its own."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, TypeVar

import torch

from runner.input.batch import cast_type
from runner.input.pytree import map_tensors

Item = TypeVar("Item")
Result = TypeVar("Result")


def one_ahead(items: Iterator[Item], start: Callable[[Item], Callable[[], Result]]) -> Iterator[Result]:
    """Yield the result of each item, in order; when it is yielded, the next item has been read and started.

    `start` returns the function that returns the result. It is called for each started item, also if the iteration ends
    early. An exception that is raised while an item is read or started is raised in place of its result.
    """

    def begin() -> Callable[[], Result] | None:
        try:
            return start(next(items))
        except StopIteration:
            return None
        except Exception as error:
            return lambda raised=error: _raise(raised)  # type: ignore[misc]

    finish = begin()
    while finish is not None:
        result, finish = finish(), begin()
        try:
            yield result
        except GeneratorExit:
            with suppress(Exception):
                if finish is not None:
                    finish()
            raise


class DeviceCopies:
    """Copies to a GPU on a stream of its own.

    The memory of a copy belongs to the stream that computes, so that torch reuses it in the order of that stream, and
    `record_stream` is unnecessary: a copy waits for what was computed before it was started, and the step that reads it
    waits for the copy. So at most one batch more than the current one is on the GPU, however far the host is ahead.
    torch reuses the pinned memory of the source after the copy.
    """

    def __init__(self, device: torch.device):
        self._device, self._stream = device, torch.cuda.Stream(device)

    def start(self, batch: Any, dtype: torch.dtype, memory_format: torch.memory_format) -> Callable[[], Any]:
        """Start to copy a batch. Return the function that returns the copy, for which the current stream waits.

        dtype: of floating-point data. memory_format: of tensors with four dimensions.
        """
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        copy = map_tensors(lambda tensor: self._copy(tensor, cast_type(tensor.dtype, dtype), memory_format), batch)
        done = self._stream.record_event()

        def finish() -> Any:
            torch.cuda.current_stream(self._device).wait_event(done)
            return copy

        return finish

    def _copy(self, tensor: torch.Tensor, dtype: torch.dtype, memory_format: torch.memory_format) -> torch.Tensor:
        if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
            return tensor.to(self._device, dtype, non_blocking=True)
        layout = memory_format if tensor.dim() == 4 else torch.preserve_format
        target = torch.empty_like(tensor, dtype=dtype, device=self._device, memory_format=layout)
        with torch.cuda.stream(self._stream):
            # Directly if the bytes are equal; otherwise torch would convert them on the CPU, and wait for the copy.
            is_equal = tensor.dtype == dtype and tensor.stride() == target.stride()
            target.copy_(tensor if is_equal else tensor.to(self._device, non_blocking=True), non_blocking=True)
        return target


def _raise(error: Exception) -> Any:
    raise error
