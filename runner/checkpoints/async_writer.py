"""Writing in the background: a copy of the state that training no longer changes, and a thread that writes it."""

import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

import torch

from runner.checkpoints.saved_state import LocalState
from runner.checkpoints.shard_file import LocalChunk


class Snapshot:
    """A copy of a state on the CPU, in memory that is reused for the next checkpoint.

    New memory would take longer than the copy, because the kernel provides it page by page.
    """

    def __init__(self) -> None:
        self._memory: dict[str, torch.Tensor] = {}

    def of(self, local: LocalState) -> LocalState:
        """Return a copy of the state. It is valid until the next call."""
        old, self._memory = self._memory, {}
        for name, chunk in local.chunks.items():
            tensor, memory = chunk.tensor, old.get(name)
            if memory is None or memory.shape != tensor.shape or memory.dtype != tensor.dtype:
                memory = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            self._memory[name] = memory.copy_(tensor, non_blocking=True)
        for device in {chunk.tensor.device for chunk in local.chunks.values() if chunk.tensor.is_cuda}:
            torch.cuda.synchronize(device)
        chunks = {name: LocalChunk(self._memory[name], chunk.offsets) for name, chunk in local.chunks.items()}
        return replace(local, chunks=chunks)


class AsyncWriter:
    """Runs functions one after the other in the background. If one fails, the next method call raises its error."""

    def __init__(self) -> None:
        self._newest: threading.Thread | None = None
        self._error: BaseException | None = None

    def submit(self, work: Callable[[], object]) -> None:
        """Run a function when all earlier ones are done. Functions after one that failed are dropped."""
        self.check()
        self._newest = threading.Thread(target=self._run, args=(work, self._newest), name="checkpoint", daemon=True)
        self._newest.start()

    def check(self) -> None:
        """Raise the error of a function that failed, once."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for all functions, at most `timeout_s`. Return True if they are done. Raise as `check` does."""
        is_done = True
        if self._newest is not None:
            self._newest.join(timeout_s)
            is_done = not self._newest.is_alive()
        self.check()
        return is_done

    def _run(self, work: Callable[[], object], previous: threading.Thread | None) -> None:
        if previous is not None:
            previous.join()
        if self._error is not None:
            return
        _lower_priority()
        try:
            work()
        except BaseException as error:  # the training thread raises it
            self._error = error


def _lower_priority() -> None:
    """Let this thread run only on idle cores.

    The threads of a training step wait for each other: hashing a block on one of their cores delays all of them. On
    fully used cores, steps after a checkpoint took four to six times as long.
    """
    if sys.platform == "linux":  # other systems have no priority per thread
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
