"""A call in a daemon thread, whose result is a future."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def call_in_daemon(function: Callable[[], T], name: str) -> "Future[T]":
    """Call `function` in a daemon thread, which does not delay the exit of the process. Return its future result."""
    future: Future[T] = Future()

    def call() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=call, daemon=True, name=name).start()
    return future
