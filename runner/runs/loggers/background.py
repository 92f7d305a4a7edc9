"""A thread that talks to a server, so that no step waits for one."""

import queue
import threading
import time
from collections.abc import Callable


class Background:
    """Makes calls one after another. What one raises is raised by the next method; the calls behind it are dropped."""

    def __init__(self, name: str):
        self._calls: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._error: Exception | None = None
        self._asked = self._done = 0
        self._changed = threading.Condition()
        threading.Thread(target=self._work, name=name, daemon=True).start()

    def submit(self, call: Callable[[], object]) -> None:
        """Ask for a call, and return at once."""
        self._raise()
        self._asked += 1
        self._calls.put(call)

    def wait(self, timeout_s: float) -> bool:
        """Until all calls are made; false where that takes longer."""
        end = time.monotonic() + timeout_s
        with self._changed:
            while self._error is None and self._done < self._asked and (left := end - time.monotonic()) > 0:
                self._changed.wait(left)
        self._raise()
        return self._done == self._asked

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _work(self) -> None:
        while self._error is None:
            call = self._calls.get()
            error = None
            try:
                call()
            except Exception as raised:
                error = raised
            with self._changed:
                self._done += 1
                self._error = error
                self._changed.notify_all()
