"""A process outlives neither the one that started it nor, unnoticed, its agent."""

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import wait

from runner.distributed.signals import ask, end_soon, received, started_by

GRACE_S = 30.0  # from the end of the parent, for a step and a save: a rank that is done ends at once
POLL_S = 0.5
PARENT_ENDED = "the process that started this rank has ended"


def end_with_parent() -> None:
    """From now on, end this process soon after the one that started it has ended, however that did; it may save."""
    threading.Thread(target=_watch, args=(_stop_and_end,), daemon=True, name="parent").start()


def end_at_once_with_parent() -> None:
    """As `end_with_parent`, in a process that has nothing to save."""
    threading.Thread(target=_watch, args=(lambda: os._exit(1),), daemon=True, name="parent").start()


def _watch(end: Callable[[], None]) -> None:
    parent = multiprocessing.parent_process()
    first = started_by() if parent is None else os.getppid()
    # An orphan is given to another process. What a fork server started is none when its parent ends, but has a pipe to
    # it; and what is forked may share that pipe with others, which hold it open.
    while os.getppid() == first and not (parent is not None and wait([parent.sentinel], POLL_S)):
        if parent is None:
            time.sleep(POLL_S)
    end()


def _stop_and_end() -> None:
    if received() == signal.SIGINT.name:  # its parent waits for it, unless there was a second Ctrl-C
        end_soon()
    ask(PARENT_ENDED)
    time.sleep(GRACE_S)
    os._exit(1)
