"""Signals that ask a run to save and stop."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

ASKING = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


@contextmanager
def unhurried() -> Iterator[None]:
    """Put off a SIGTERM to the end: torchrun sends it as soon as one rank has died, to those that tell of it."""
    received = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: received.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
        if received:
            signal.raise_signal(signal.SIGTERM)


class StopRequest:
    """While entered, the first signal asks the loop to stop, and a second Ctrl-C interrupts at once.

    It stops after its step, or in an evaluation after that one's batch.
    """

    def __init__(self) -> None:
        self.received: str | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "StopRequest":
        self._before = {number: signal.signal(number, self._receive) for number in ASKING}
        return self

    def __exit__(self, *details: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.received and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = signal.Signals(number).name
