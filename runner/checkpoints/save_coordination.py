"""Coordination of the ranks that save a checkpoint: each reports its file, and rank 0 completes the directory."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Literal

import torch.distributed as dist

from runner.distributed.collectives import Collectives
from runner.distributed.world import World
from runner.distributed.world_store import set_tcp_timeouts

AFTER_FAILURE_S = 1.0
UNSEEN_FACTOR = 10  # timeouts are this many times longer if the progress of other ranks cannot be seen
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.05


class StoreLost(RuntimeError):
    """The process that serves the ranks' store has exited; usually it is the one that started them."""


@dataclass
class SaveCoordinator:
    """This rank's connection to the other ranks that save. During a save only rank 0 waits for other ranks.

    If the store is lost, the ranks save synchronously in their training threads and report by a collective.
    """

    rank: int = 0
    world_size: int = 1
    store: dist.Store | None = None  # None in a world of one rank
    timeout_s: float = 60.0  # how long rank 0 waits for a rank while no file grows
    is_shared: bool = True  # all ranks see the same files
    run_failed: threading.Event = field(default_factory=threading.Event)  # on this rank: others may have exited
    peer_failed: threading.Event = field(default_factory=threading.Event)  # another rank has died or failed
    collectives: Collectives = field(default_factory=lambda: Collectives(1))
    store_answers: Callable[[], bool] = lambda: True
    has_lost_store: bool = False  # as observed by this rank
    synchronous: bool = False  # agreed by all ranks

    @classmethod
    def of(cls, world: World, is_shared: bool = True) -> "SaveCoordinator":
        # A separate connection: a blocking call on a shared one would delay its other users.
        store = world.store.namespace("checkpoints").clone() if world.world_size > 1 else None
        set_tcp_timeouts(store, world.backend.timeout_s)
        timeout_s = world.backend.timeout_s * (1 if is_shared else UNSEEN_FACTOR)
        coordinator = cls(world.rank, world.world_size, store, timeout_s, is_shared)
        coordinator.collectives, coordinator.store_answers = world.collectives, world.store.is_reachable
        world.watchdog.on_peer_failure(lambda why: coordinator.peer_failed.set())
        return coordinator

    def agree(self, is_last: bool, gave_up: bool) -> bool:
        """Agree with all ranks on how to save next. Return True if any rank gave up the previous checkpoint.

        All ranks must call it while none is saving. If `is_last`, no later checkpoint follows, and a lost store is
        detected now. `gave_up` is whether this rank gave up the previous checkpoint.
        """
        if self.world_size == 1 or self.synchronous:
            return False  # a synchronous save cannot lose the store, and every rank knows of an earlier loss
        self.has_lost_store |= is_last and not self.store_answers()
        self.synchronous, any_gave_up = self.collectives.any_of_async(self.has_lost_store, gave_up)()
        return any_gave_up

    def report(self, step: int, message: dict[str, Any]) -> None:
        """Send rank 0 what this rank has written, or its error. Raise StoreLost."""
        if self.synchronous:
            self.collectives.gather_objects(message)
            return
        assert self.store is not None
        with self._detecting_lost_store():
            self.store.set(f"{step}/{self.rank}", json.dumps(message))

    def collect(self, step: int, progress: Callable[[], object]) -> list[dict[str, Any]]:
        """Return the reports of all other ranks, in order, on rank 0.

        progress: returns a value that changes while the other ranks write. Raise TimeoutError if the value does not
        change for `timeout_s` and a report is missing. Raise StoreLost.
        """
        if self.synchronous:
            return (self.collectives.gather_objects(None) or [])[1:]
        with self._detecting_lost_store():
            return [self._collect(step, rank, progress) for rank in range(1, self.world_size)]

    def announce(self, step: int, what: Literal["dropped", "ended"]) -> None:
        """On rank 0, announce that the save has ended, or that it is given up, before its files are removed."""
        if self.store is not None and not self.synchronous:
            with suppress(RuntimeError):  # the store may be lost
                self.store.set(f"{step}/{what}", "")

    def is_aborted(self, step: int) -> bool:
        """Return True if rank 0 gave up the checkpoint, so that this rank must remove its file. Raise StoreLost."""
        if self.synchronous:
            return False
        assert self.store is not None
        with self._detecting_lost_store():
            return self.store.check([f"{step}/dropped"])

    def wait_for_end(self, step: int, progress: Callable[[], object], timeout_s: float) -> None:
        """On a rank other than 0, wait until rank 0 has announced the end. Enter no collective before it returns.

        Return also if `progress()` has not changed for `timeout_s`, or if a rank has failed. The next collective
        reports that failure.
        """
        if not self.synchronous:
            with suppress(RuntimeError):  # the store may be lost
                self._wait_for(f"{step}/ended", progress, lambda: timeout_s, self.peer_failed)

    def _collect(self, step: int, rank: int, progress: Callable[[], object]) -> dict[str, Any]:
        assert self.store is not None

        def timeout_s() -> float:
            return min(self.timeout_s, AFTER_FAILURE_S) if self.run_failed.is_set() else self.timeout_s

        key = f"{step}/{rank}"
        if not self._wait_for(key, progress, timeout_s, threading.Event()):
            raise TimeoutError(f"rank {rank} wrote nothing of the checkpoint for {timeout_s():g} s")
        message: dict[str, Any] = json.loads(self.store.get(key))
        self.store.delete_key(key)
        return message

    def _wait_for(
        self, key: str, progress: Callable[[], object], timeout_s: Callable[[], float], stop: threading.Event
    ) -> bool:
        """Poll the store for a key. Return False if `stop` is set, or if the progress is unchanged for `timeout_s`."""
        assert self.store is not None
        value, since, pause_s = progress(), time.monotonic(), _FIRST_PAUSE_S
        while not self.store.check([key]):
            if stop.wait(pause_s):
                return False
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            if (now := progress()) != value:
                value, since = now, time.monotonic()
            elif time.monotonic() - since > timeout_s():
                return False
        return True

    @contextmanager
    def _detecting_lost_store(self) -> Iterator[None]:
        try:
            yield
        except dist.DistNetworkError as error:
            self.has_lost_store = True
            raise StoreLost(f"the ranks' store does not answer: {error}") from None
