"""Writing beside training: the copy that is written while the loop goes on, and the thread that writes it."""

import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

import torch

from runner.training.saved_state import HeldState, Piece


class Snapshot:
    """This rank's pieces as they are now, on the CPU, in memory that is kept from one checkpoint to the next.

    New memory would cost more than copying does: the system hands it out page by page.
    """

    def __init__(self) -> None:
        self._kept: dict[str, torch.Tensor] = {}

    def of(self, held: HeldState) -> HeldState:
        """A copy, which holds until the next one is taken."""
        copies: dict[tuple[object, ...], torch.Tensor] = {}  # what has several names is copied once
        pieces: dict[str, Piece] = {}
        for name, piece in held.pieces.items():
            tensor = piece.tensor
            key = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
            if key not in copies:
                copies[key] = self._memory(name, tensor).copy_(tensor, non_blocking=True)
            pieces[name] = Piece(copies[key], piece.offsets)
        self._kept = {name: tensor for name, tensor in self._kept.items() if name in pieces}
        for device in {piece.tensor.device for piece in held.pieces.values() if piece.tensor.is_cuda}:
            torch.cuda.synchronize(device)
        return replace(held, pieces=pieces)

    def _memory(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        kept = self._kept.get(name)
        if kept is None or kept.shape != tensor.shape or kept.dtype != tensor.dtype:
            kept = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            self._kept[name] = kept
        return kept


class Background:
    """One thread, which does what it is given in turn. An error is raised by whatever is called next."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: list[Callable[[], object]] = []
        self._is_busy = False
        self._error: BaseException | None = None

    def do(self, work: Callable[[], object]) -> None:
        """Begin it when all before it is done. What comes after one that failed is not done."""
        self.check()
        with self._changed:
            self._waiting.append(work)
            if not self._is_busy:
                self._is_busy = True
                threading.Thread(target=self._run, name="checkpoint", daemon=True).start()

    def check(self) -> None:
        """Raises what the thread has raised, once."""
        with self._changed:
            error, self._error = self._error, None
        if error is not None:
            raise error

    def wait(self, timeout_s: float | None = None) -> bool:
        """Until all is done, or so long. Returns whether it is. Raises what the thread has raised."""
        with self._changed:
            is_done = self._changed.wait_for(lambda: not self._is_busy, timeout_s)
        self.check()
        return is_done

    def _run(self) -> None:
        _give_way()
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
            except BaseException as error:  # the loop's thread raises it
                with self._changed:
                    self._error = error


def _give_way() -> None:
    """Let this thread run where a core has nothing else to do.

    The threads of a step wait for each other: where one is held up for the time of a block that is hashed, all are. On
    cores that are all busy the steps after a checkpoint took four to six times as long.
    """
    if sys.platform == "linux":  # elsewhere a thread has no priority of its own
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
