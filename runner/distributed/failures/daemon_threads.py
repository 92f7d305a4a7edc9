"""Calls in threads that may still wait for the ranks' store when their process exits."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def call_in_daemon(function: Callable[[], T], name: str) -> "Future[T]":
    """Call `function` in a daemon thread, which may outlive the main thread. Return its future result."""
    future: Future[T] = Future()

    def call() -> None:
        try:
            future.set_result(function())
        except Exception as error:
            future.set_exception(error)

    threading.Thread(target=call, daemon=True, name=name).start()
    return future
