"""The cores of a process. Nothing here imports torch, so that a machine can list them at once."""

import os


def allowed_cores() -> set[int]:
    """Return the cores on which this process may run."""
    if hasattr(os, "sched_getaffinity"):
        return set(os.sched_getaffinity(0))
    return set(range(os.cpu_count() or 1))
