"""Failures of a loader's worker processes: a worker has died, or lacks the shared memory to send a batch."""

import os
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing import connection
from typing import Any, TypeVar

import torch
from torch.utils.data import get_worker_info

from runner.input.pytree import map_tensors, num_bytes

SHARED = "/dev/shm"  # a file system in memory
FIX = f"set loader.num_workers=0, or make {SHARED} larger (docker run --shm-size=8g)"
_MIB = 2**20
_EXIT_S = 10.0  # the time that a killed process takes to exit after it has closed its connections
T = TypeVar("T")


class WorkerDied(RuntimeError):
    """A worker process has exited without reporting an error."""


def collated(samples: Any, collate: Callable[[Any], T]) -> T:
    """Collate samples, in shared memory if this is a worker.

    The thread that sends a batch would lose an error that occurs when it moves the batch to shared memory.
    """
    if get_worker_info() is None:
        return collate(samples)
    try:
        return map_tensors(torch.Tensor.share_memory_, collate(samples))
    except RuntimeError as error:
        if "</torch_" not in str(error):  # the name of torch's shared memory files
            raise
        raise OSError(
            f"a loader worker cannot get {num_bytes(samples) / _MIB:,.1f} MiB of shared memory for a batch "
            f"({str(error).splitlines()[0]}); {_free_memory()}; {FIX}"
        ) from None


def shared(batch: Any) -> Any:
    """Move a collated batch to shared memory if this is a worker."""
    return collated(batch, lambda whole: whole)


def worker_death(error: Exception, workers: Sequence[Any]) -> WorkerDied | None:
    """Return an error that names the dead workers, if they are the reason for an error; None if all are alive.

    workers: processes of multiprocessing. If a connection was closed, wait until its worker has exited.
    """
    if workers and isinstance(error, ConnectionError | EOFError):
        with suppress(RuntimeError):  # raised by torch's handler of SIGCHLD
            exited = connection.wait([worker.sentinel for worker in workers], _EXIT_S)
            for worker in workers:
                if worker.sentinel in exited:
                    worker.join(_EXIT_S)
    dead = [(number, worker) for number, worker in enumerate(workers) if not worker.is_alive()]
    if not dead:
        return None
    deaths = []
    for number, worker in dead:
        code = worker.exitcode
        status = signal.Signals(-code).name if code < 0 else f"exit status {code}"
        deaths.append(f"loader worker {number} (process {worker.pid}) died: {status}")
    hint = ""
    if any(worker.exitcode == -signal.SIGBUS for _, worker in dead):
        hint = f"; {_free_memory()}; {FIX}"
    elif any(worker.exitcode == -signal.SIGKILL for _, worker in dead):
        hint = "; the kernel may have killed it for lack of memory: see dmesg, or try a smaller loader.num_workers"
    return WorkerDied(", ".join(deaths) + hint)


def _free_memory() -> str:
    try:
        found = os.statvfs(SHARED)
    except OSError:
        return f"{SHARED} does not exist"
    free, size = (count * found.f_frsize / _MIB for count in (found.f_bavail, found.f_blocks))
    return f"{SHARED} has {free:,.1f} MiB free of {size:,.1f}"
