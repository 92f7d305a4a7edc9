"""A thread that executes functions one after another, so that training waits neither for a disk nor for a server."""

import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import suppress

from runner.process.daemon_thread import call_in_daemon


class BackgroundThread:
    """Executes functions in the background, one after another, in daemon threads, which do not delay the exit.

    If a function raises, the functions that wait for it are dropped, and the next method call raises the exception.
    """

    def __init__(self, name: str):
        self._name = name
        self._newest: Future[None] | None = None

    def submit(self, work: Callable[[], object]) -> None:
        """Execute a function when all earlier ones are done."""
        self.wait(0)
        previous = self._newest

        def run() -> None:
            if previous is not None:
                previous.result()  # raises the exception of an earlier function
            _lower_priority()
            work()

        self._newest = call_in_daemon(run, self._name)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for all functions, at most `timeout_s`. Return True if they are done."""
        newest = self._newest
        if newest is None:
            return True
        if not wait([newest], timeout_s).done:
            return False
        self._newest = None
        newest.result()
        return True


def _lower_priority() -> None:
    """Let this thread run only on idle cores.

    The threads of a training step wait for each other: hashing a block on one of their cores delays all of them. On
    fully used cores, steps after a checkpoint took four to six times as long.
    """
    if sys.platform == "linux":  # other systems have no priority per thread
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
