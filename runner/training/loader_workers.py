"""What goes wrong with a loader's worker processes: one has died, or cannot get the memory that a batch is sent in."""

import os
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing import connection
from typing import Any, TypeVar

import torch
from torch.utils.data import get_worker_info

from runner.training.pytree import map_tensors, tensors

SHARED = "/dev/shm"  # the file system whose files are memory
FIX = f"set loader.num_workers=0, or make {SHARED} larger (docker run --shm-size=8g)"
_MIB = 2**20
_DEATH_S = 10.0  # a killed process closes its connections, and is gone only then
T = TypeVar("T")


class WorkerDied(RuntimeError):
    """A worker process has ended without a word."""


def collated(samples: Any, collate: Callable[[Any], T]) -> T:
    """A batch of samples, in shared memory if this is a worker: an error of the thread that sends it would be lost."""
    if get_worker_info() is None:
        return collate(samples)
    try:
        return map_tensors(torch.Tensor.share_memory_, collate(samples))
    except RuntimeError as error:
        if "</torch_" not in str(error):  # the name of what torch shares
            raise
        needed = sum(tensor.numel() * tensor.element_size() for tensor in tensors(samples)) / _MIB
        why = str(error).splitlines()[0]
        raise OSError(
            f"a loader worker cannot get {needed:,.1f} MiB of shared memory for a batch ({why}); {_room()}; {FIX}"
        ) from None


def shared(batch: Any) -> Any:
    """A batch that the data set itself has collated."""
    return collated(batch, lambda whole: whole)


def death_behind(error: Exception, workers: Sequence[Any]) -> WorkerDied | None:
    """What is to be said of workers that have ended where a batch cannot be had; None where all live.

    workers: of multiprocessing. Where a connection has ended, its worker is waited for.
    """
    if workers and isinstance(error, ConnectionError | EOFError):
        with suppress(RuntimeError):  # of torch's handler of SIGCHLD, once it is gone
            ended = connection.wait([worker.sentinel for worker in workers], _DEATH_S)
            for worker in workers:
                if worker.sentinel in ended:  # a connection too
                    worker.join(_DEATH_S)
    dead = [(number, worker) for number, worker in enumerate(workers) if not worker.is_alive()]
    if not dead:
        return None
    said = [f"loader worker {number} (process {worker.pid}) died: {_how(worker.exitcode)}" for number, worker in dead]
    hint = ""
    if any(worker.exitcode == -signal.SIGBUS for _, worker in dead):
        hint = f"; {_room()}; {FIX}"
    elif any(worker.exitcode == -signal.SIGKILL for _, worker in dead):
        hint = "; who runs out of memory is killed like that: see dmesg, or try a smaller loader.num_workers"
    return WorkerDied(", ".join(said) + hint)


def _how(exit_code: int | None) -> str:
    if exit_code is None:
        return "nobody knows how"
    return signal.Signals(-exit_code).name if exit_code < 0 else f"exit status {exit_code}"


def _room() -> str:
    try:
        found = os.statvfs(SHARED)
    except OSError:
        return f"there is no {SHARED}"
    free, size = (count * found.f_frsize / _MIB for count in (found.f_bavail, found.f_blocks))
    return f"{SHARED} has {free:,.1f} MiB free of {size:,.1f}"
