"""Memory that the C library keeps after it was freed."""

import ctypes

_libc = ctypes.CDLL(None)


def return_freed_memory() -> None:
    """Return the memory that this process has freed to the system, once. Do nothing with libraries other than glibc."""
    if hasattr(_libc, "malloc_trim"):
        _libc.malloc_trim(0)
