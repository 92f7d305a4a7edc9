"""A rank outlives neither the process that started it nor, unnoticed, its agent."""

import multiprocessing
import os
import signal
import threading
import time
from multiprocessing.connection import wait

GRACE_S = 10.0


def end_with_parent() -> None:
    """From now on, end this process soon after the one that started it has ended, however that did."""
    threading.Thread(target=_watch, daemon=True, name="parent").start()


def _watch() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
    else:
        started_by = os.getppid()
        while os.getppid() == started_by:  # an orphan is given to another process
            time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGTERM)  # it may save what it has done
    time.sleep(GRACE_S)
    os._exit(1)
