"""Garbage collection and memory allocation of the runner's own processes; a caller's process keeps its settings.

The garbage collector is off during imports and never traverses the imported objects, which stay until the exit: that
saves 1.1 s of a start of 4.4 s. glibc keeps freed memory: by default it returns the top of its heap and every large
block to the system, which hands them out again page by page. Depending on the layout of the heap that costs 12,000 page
faults and a third of the time of a ConvNet's step, or nothing.
"""

import atexit
import ctypes
import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager

# https://man7.org/linux/man-pages/man3/mallopt.3.html
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_NEVER = -1
_LARGEST = 2**25  # bytes: the largest threshold that glibc accepts; larger blocks are returned to the system
_LARGE = 2**20  # bytes of a block that is returned while a model is built
_libc = ctypes.CDLL(None)
_keeps = False  # keep_freed_memory has set the thresholds


def begin_imports() -> None:
    """Turn the garbage collector off, from a process's first line until `tune_process`."""
    gc.disable()


def tune_process() -> None:
    """End the imports of one of the runner's own processes, and let it keep the memory that it frees."""
    if not gc.isenabled():
        freeze_objects()
        gc.enable()
    keep_freed_memory()


def freeze_objects() -> None:
    """Exclude all objects that exist now from garbage collection."""
    gc.freeze()
    atexit.register(_unfreeze)


def _unfreeze() -> None:
    gc.unfreeze()  # some objects warn if they are never collected
    gc.disable()  # Python collects once when it clears the modules; it would also collect before that


def keep_freed_memory() -> bool:
    """Let glibc keep freed memory for the next allocation. Return True if it does from now on.

    Settings of glibc's allocator in the environment take precedence, and other C libraries are left unchanged.
    """
    if not hasattr(_libc, "mallopt") or any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ):
        return False
    global _keeps
    _keeps = all([_libc.mallopt(_MMAP_THRESHOLD, _LARGEST), _libc.mallopt(_TRIM_THRESHOLD, _NEVER)])
    return _keeps


@contextmanager
def returning_large_blocks() -> Iterator[None]:
    """Return large blocks to the system as soon as they are freed, in a process that otherwise keeps freed memory.

    A deferred model and its dry run allocate a block for one tensor after another. Small objects that are allocated in
    a freed block prevent its reuse, so that the heap would grow by the size of the whole model.
    """
    if _keeps:
        _libc.mallopt(_MMAP_THRESHOLD, _LARGE)
    try:
        yield
    finally:
        if _keeps:
            _libc.mallopt(_MMAP_THRESHOLD, _LARGEST)
