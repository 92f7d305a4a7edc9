"""Threads that may still wait for the ranks' store when their process ends.

Python ends such a thread as soon as it comes back from torch, which torch answers with an abort of the process: the
exit status would be that of a crash. A process that has one ends without Python's clearing away.
"""

import threading
import weakref
from collections.abc import Callable

_started: "weakref.WeakSet[threading.Thread]" = weakref.WeakSet()


def start_waiting(target: Callable[[], None], name: str) -> threading.Thread:
    """Run it in a thread that may be left behind."""
    thread = threading.Thread(target=target, daemon=True, name=name)
    _started.add(thread)
    thread.start()
    return thread


def is_one_left() -> bool:
    return any(thread.is_alive() for thread in _started)
