"""Signals that ask a run to save and stop."""

import signal
from types import FrameType
from typing import Any

ASKING = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


class StopRequest:
    """While entered, the first signal asks the loop to stop after its step; a second Ctrl-C interrupts at once."""

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
