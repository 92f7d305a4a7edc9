"""Threads that may still wait for the ranks' store when their process exits.

Python terminates such a thread as soon as it returns from torch, and torch then aborts the process: the exit status
would be that of a crash. A process with such a thread exits without Python's finalization.
"""

import contextlib
import threading
import weakref
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
_started: "weakref.WeakSet[threading.Thread]" = weakref.WeakSet()


def start_daemon(target: Callable[[], object], name: str) -> threading.Thread:
    """Run `target` in a daemon thread that may outlive the main thread."""
    thread = threading.Thread(target=target, daemon=True, name=name)
    _started.add(thread)
    thread.start()
    return thread


def is_any_running() -> bool:
    """Return True if a thread of `start_daemon` is still running."""
    return any(thread.is_alive() for thread in _started)


def call_with_timeout(timeout_s: float, function: Callable[[], T]) -> T | None:
    """Return `function()`, or None if it raises RuntimeError or takes longer, as with an unreachable store."""
    results: list[T] = []

    def call() -> None:
        with contextlib.suppress(RuntimeError):
            results.append(function())

    start_daemon(call, "store").join(timeout_s)
    return results[0] if results else None
