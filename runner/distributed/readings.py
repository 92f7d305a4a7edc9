"""Values that the host reads from its device later, so that no step waits for the device."""

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import torch

ASYNCHRONOUS = {"cuda"}  # types of devices that are still computing when an operator has returned


def is_asynchronous(device: torch.device) -> bool:
    return device.type in ASYNCHRONOUS


class _Reading(NamedTuple):
    step: int  # counted by `end_step`
    values: torch.Tensor  # on the CPU; complete after the event
    copied: torch.cuda.Event | None
    use: Callable[[torch.Tensor], None]


class Readings:
    """Values of this rank's device that are used in the order in which they were added.

    Values on the CPU are used immediately. Values on a GPU are copied while it computes, and are used at the end of the
    next step, or earlier by `flush`. If `use` raises an exception, all later readings are dropped.
    """

    def __init__(self) -> None:
        self._queue: deque[_Reading] = deque()
        self._step = 0

    def add(self, values: torch.Tensor, use: Callable[[torch.Tensor], None]) -> None:
        """Call `use` with the values on the CPU, once they are computed and all earlier readings are used."""
        if not self._queue and not is_asynchronous(values.device):
            use(values)
            return
        copy = torch.empty(values.shape, dtype=values.dtype, pin_memory=values.is_cuda)
        copy.copy_(values, non_blocking=True)
        copied = torch.cuda.current_stream(values.device).record_event() if values.is_cuda else None
        self._queue.append(_Reading(self._step, copy, copied, use))

    def then(self, use: Callable[[], None]) -> None:
        """Call `use` together with the last reading, after it: immediately if none is left."""
        if self._queue:
            self._queue.append(_Reading(self._queue[-1].step, torch.empty(0), None, lambda values: use()))
        else:
            use()

    def end_step(self) -> None:
        """Use the values of the steps before this one, and wait for those that are not yet computed."""
        while self._queue and self._queue[0].step < self._step:
            self._use_first()
        self._step += 1

    def flush(self) -> None:
        """Wait for all values, and use them."""
        while self._queue:
            self._use_first()

    def flush_complete(self) -> None:
        """Use the values that are already computed, in order, up to the first that is not."""
        while self._queue and ((copied := self._queue[0].copied) is None or copied.query()):
            self._use_first()

    def _use_first(self) -> None:
        reading = self._queue.popleft()
        if reading.copied is not None:
            reading.copied.synchronize()
        try:
            reading.use(reading.values)
        except BaseException:
            self._queue.clear()
            raise
