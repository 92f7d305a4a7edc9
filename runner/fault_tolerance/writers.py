"""How the ranks of a world write one checkpoint: each its own file; rank 0 puts them in place when all are there."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from runner.distributed.collectives import Collectives
from runner.distributed.silence import bound_silence
from runner.distributed.world import World

AFTER_FAILURE_S = 1.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.05


class StoreGone(RuntimeError):
    """Whoever served the ranks' store has ended, the process that started them as a rule: nobody can tell rank 0."""


@dataclass
class Writers:
    """This rank among those that write. While it writes, no rank but 0 waits for another.

    Once the store has gone they write in the loop's thread, all together, and tell each other by a collective.
    """

    rank: int = 0
    world_size: int = 1
    store: dist.Store | None = None  # None in a world of one
    timeout_s: float = 60.0  # that rank 0 waits for a rank whose file no longer grows
    given_up: threading.Event = field(default_factory=threading.Event)  # the run has failed: a rank may be gone
    alarmed: threading.Event = field(default_factory=threading.Event)  # another rank has died or failed
    collectives: Collectives = field(default_factory=lambda: Collectives(1))
    answers: Callable[[], bool] = lambda: True  # whether the store still does
    has_lost_store: bool = False  # as far as this rank has seen
    together: bool = False

    @classmethod
    def of(cls, world: World) -> "Writers":
        # A connection of its own: what waits on another is in the way of nobody.
        store = world.store.topic("checkpoints").clone() if world.world_size > 1 else None
        bound_silence(store, world.backend.timeout_s)
        writers = cls(world.rank, world.world_size, store, world.backend.timeout_s)
        writers.collectives, writers.answers = world.collectives, world.store.answers
        world.watch.at_alarm(lambda why: writers.alarmed.set())
        return writers

    def agree(self, is_last: bool, gave_up: bool) -> bool:
        """On how to write the next one. Returns whether any rank gave the last one up. All ranks must call it, idle.

        is_last: none comes later that could make up for it, so that the store is asked whether it is there.
        """
        if self.world_size == 1 or self.together:
            return False  # without a store none is given up for it; what this rank alone knows of before, no other does
        self.has_lost_store |= is_last and not self.answers()
        self.together, any_gave_up = self.collectives.any_of_later(self.has_lost_store, gave_up)()
        return any_gave_up

    def tell(self, step: int, message: dict[str, Any]) -> None:
        """Let rank 0 know what this rank has written, or why it has not. Raises StoreGone."""
        if self.together:
            self.collectives.collect(message)
            return
        assert self.store is not None
        with self._asking():
            self.store.set(f"{step}/{self.rank}", json.dumps(message))

    def drop(self, step: int) -> None:
        """Let the others know that there will be no such checkpoint; for rank 0, before it removes what is there."""
        if self.store is not None and not self.together:
            self.store.set(f"{step}/dropped", "")

    def end(self, step: int) -> None:
        """Let the others know that the checkpoint is in its place, or was given up; for rank 0."""
        if self.store is not None and not self.together:
            self.store.set(f"{step}/ended", "")

    def wait_for_end(self, step: int, grown: Callable[[], object], patience_s: float) -> None:
        """Until rank 0 has done so, on another rank, which would miss it in a collective meanwhile.

        It returns too where nothing has changed of `grown` for so long, or a rank has failed: what follows tells that.
        """
        if self.together:
            return
        assert self.store is not None
        seen, since, pause_s = grown(), time.monotonic(), _FIRST_PAUSE_S
        with suppress(RuntimeError):  # the store may be gone
            while not self.store.check([f"{step}/ended"]) and not self.alarmed.wait(pause_s):
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
                if (now := grown()) != seen:
                    seen, since = now, time.monotonic()
                if time.monotonic() - since > patience_s:
                    return

    def is_dropped(self, step: int) -> bool:
        """Whether what was written just now is to be removed: rank 0 may have removed the folder before.

        Raises StoreGone.
        """
        if self.together:
            return False
        assert self.store is not None
        with self._asking():
            return self.store.check([f"{step}/dropped"])

    def hear(self, step: int, grown: Callable[[], object]) -> list[dict[str, Any]]:
        """What the other ranks tell, in the order of ranks, on rank 0.

        grown: what changes as long as the others write. Raises TimeoutError where it does not and a rank is silent, and
        StoreGone.
        """
        if self.together:
            return (self.collectives.collect(None) or [])[1:]
        with self._asking():
            return [self._hear(step, rank, grown) for rank in range(1, self.world_size)]

    def _hear(self, step: int, rank: int, grown: Callable[[], object]) -> dict[str, Any]:
        assert self.store is not None
        key, pause_s = f"{step}/{rank}", _FIRST_PAUSE_S
        seen, since = grown(), time.monotonic()
        while not self.store.check([key]):
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            if (now := grown()) != seen:
                seen, since = now, time.monotonic()
            patience_s = min(self.timeout_s, AFTER_FAILURE_S) if self.given_up.is_set() else self.timeout_s
            if time.monotonic() - since > patience_s:
                raise TimeoutError(f"rank {rank} wrote nothing of the checkpoint for {patience_s:g} s")
        message: dict[str, Any] = json.loads(self.store.get(key))
        self.store.delete_key(key)
        return message

    @contextmanager
    def _asking(self) -> Iterator[None]:
        try:
            yield
        except dist.DistNetworkError as error:
            self.has_lost_store = True
            raise StoreGone(f"the ranks' store does not answer: {error}") from None
