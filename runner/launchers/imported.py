"""Imports without the garbage collector, which would go through all that is there again and again: 1.1 s of 4.4.

For processes of the runner's own, in which what is imported stays to the end; the collector of a caller's process, a
notebook's say, is left as it is.
"""

import atexit
import gc
from functools import cache


def begin_imports() -> None:
    """From a process's first line on, until `end_imports`."""
    gc.disable()


def end_imports() -> None:
    """From here on garbage is looked for, among what comes from here on; where `begin_imports` was called."""
    if not gc.isenabled():
        set_aside()
        gc.enable()


def set_aside() -> None:
    """What is there by now is not gone through when garbage is looked for."""
    gc.freeze()
    _clear_away_at_exit()


@cache
def _clear_away_at_exit() -> None:
    atexit.register(_clear_away)


def _clear_away() -> None:
    gc.unfreeze()  # some of it complains when it is not cleared away itself
    gc.disable()  # that is once, when the modules go; Python would go through all of them before as well
