"""What a step frees is kept for the next one: the system would clear it and hand it out again page by page.

glibc gives back what is free at the end of its heap, and all of a large block, so that whether a step gets its memory
anew depends on what happens to lie behind it: 12,000 pages and a third of the time of a ConvNet's step, or none.
"""

import ctypes
import os
from collections.abc import Callable, Mapping
from functools import cache

# https://man7.org/linux/man-pages/man3/mallopt.3.html
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_NEVER = -1
_LARGEST = 2**25  # bytes: that glibc takes for a threshold; of a larger block the system has the pages back


def keep_freed_memory(environ: Mapping[str, str] = os.environ) -> bool:
    """For a process of the runner's own. Returns whether it does, from now on.

    Not where the environment has chosen for glibc, nor with another library than that.
    """
    chosen = any(name.startswith("MALLOC_") for name in environ) or "glibc.malloc" in environ.get("GLIBC_TUNABLES", "")
    mallopt = None if chosen else _of_libc("mallopt")
    return mallopt is not None and all([mallopt(_MMAP_THRESHOLD, _LARGEST), mallopt(_TRIM_THRESHOLD, _NEVER)])


def give_back_freed_memory() -> None:
    """Once: what an earlier job of this process had."""
    if trim := _of_libc("malloc_trim"):
        trim(0)


@cache
def _of_libc(name: str) -> Callable[..., int] | None:
    return getattr(ctypes.CDLL(None), name, None)
