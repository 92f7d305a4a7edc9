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
        """Return a copy, which is valid until the next call."""
        copies: dict[tuple[object, ...], torch.Tensor] = {}  # a tensor with several names is copied once
        chunks: dict[str, LocalChunk] = {}
        for name, chunk in local.chunks.items():
            tensor = chunk.tensor
            key = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
            if key not in copies:
                memory = self._memory.get(name)
                if memory is None or memory.shape != tensor.shape or memory.dtype != tensor.dtype:
                    memory = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
                    self._memory[name] = memory
                copies[key] = memory.copy_(tensor, non_blocking=True)
            chunks[name] = LocalChunk(copies[key], chunk.offsets)
        self._memory = {name: tensor for name, tensor in self._memory.items() if name in chunks}
        for device in {chunk.tensor.device for chunk in local.chunks.values() if chunk.tensor.is_cuda}:
            torch.cuda.synchronize(device)
        return replace(local, chunks=chunks)


class AsyncWriter:
    """A thread that runs functions one after the other. The next call of a method raises an error of the thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: list[Callable[[], object]] = []
        self._is_busy = False
        self._error: BaseException | None = None

    def submit(self, work: Callable[[], object]) -> None:
        """Run a function when all earlier ones are done. Functions after one that failed are dropped."""
        self.check()
        with self._changed:
            self._waiting.append(work)
            if not self._is_busy:
                self._is_busy = True
                threading.Thread(target=self._run, name="checkpoint", daemon=True).start()

    def check(self) -> None:
        """Raise the error of the thread, once."""
        with self._changed:
            error, self._error = self._error, None
        if error is not None:
            raise error

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for all functions, at most `timeout_s`. Return True if they are done; raise the error of the thread."""
        with self._changed:
            is_done = self._changed.wait_for(lambda: not self._is_busy, timeout_s)
        self.check()
        return is_done

    def _run(self) -> None:
        _lower_priority()
        while True:
            with self._changed:
                if not self._waiting or self._error is not None:
                    self._waiting.clear()
                    self._is_busy = False
                    self._changed.notify_all()
                    return
                work = self._waiting.pop(0)
            try:
                work()
            except BaseException as error:  # the training thread raises it
                with self._changed:
                    self._error = error


def _lower_priority() -> None:
    """Let this thread run only on idle cores.

    The threads of a training step wait for each other: hashing a block on one of their cores delays all of them. On
    fully used cores, steps after a checkpoint took four to six times as long.
    """
    if sys.platform == "linux":  # other systems have no priority per thread
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
