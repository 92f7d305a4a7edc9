"""What a rank notices beside its loop: another one here that dies, a failure that the loop does not come to."""

import json
import os
import select
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from runner.distributed.ending import Ending
from runner.distributed.environment import RankInfo
from runner.distributed.hung_rank import answer_of, describe, keep
from runner.distributed.left_waiting import start_waiting
from runner.distributed.neighbours import Neighbours
from runner.distributed.rank_trace import RankTrace
from runner.distributed.world_store import WorldStore

QUIET_S = 5.0  # without a step, after which the store is asked how the others are


class Watch:
    """A thread from `start` to `stop`, in a world of several ranks."""

    def __init__(
        self, rank_info: RankInfo, store: WorldStore, neighbours: Neighbours, trace: RankTrace, ending: Ending
    ):
        self._rank_info, self._store, self._neighbours = rank_info, store, neighbours
        self._trace, self._ending = trace, ending
        self._alarms: list[Callable[[str], None]] = []
        self._stopped = threading.Event()
        self._failed_since: float | None = None

    def at_alarm(self, act: Callable[[str], None]) -> None:
        """Act, in the watch's thread, when another rank has died or failed; told why. For what waits in vain then."""
        self._alarms.append(act)

    def start(self) -> None:
        """All ranks have met by now."""
        self._alarms.clear()
        self._stopped, self._failed_since = threading.Event(), None
        if self._rank_info.world_size > 1:
            start_waiting(partial(self._run, self._stopped), "watch")

    def stop(self) -> None:
        self._stopped.set()

    def _run(self, stopped: threading.Event) -> None:
        handles = self._handles()
        poller = select.poll()
        for handle in handles:
            poller.register(handle, select.POLLIN)
        try:
            while not stopped.is_set() and not self._ending.failed:
                for handle, _ in poller.poll(500):
                    poller.unregister(handle)
                    self._alarm(f"rank {handles[handle]} has ended", stopped)
                self._look_up(stopped)
        except RuntimeError:
            pass  # the store has gone: whoever waits for its machine's ranks finds out by itself
        finally:
            for handle in handles:
                os.close(handle)

    def _handles(self) -> dict[int, int]:
        """A descriptor that can be read once a rank of this machine has ended, and the rank."""
        handles = {}
        for rank, process in self._neighbours.here.items():
            try:
                handles[os.pidfd_open(process.pid)] = rank
            except OSError:  # it has ended, or the system has none
                continue
        return handles

    def _alarm(self, why: str, stopped: threading.Event) -> None:
        for act in self._alarms:
            if not stopped.is_set():
                act(why)

    def _look_up(self, stopped: threading.Event) -> None:
        """Where this rank has made no step for a while: whether another one has failed, or misses it."""
        store, (_, since_s) = self._store.job, self._trace.where()
        if store is None or since_s < min(QUIET_S, self._ending.timeout_s / 2) or not self._store.answers():
            return
        if store.check(["asked"]) and self._rank_info.rank in json.loads(store.get("asked")):
            self._answer()
        if not store.check(["failure"]):
            return
        if self._failed_since is None:
            self._failed_since = time.monotonic()
            self._alarm("another rank has failed", stopped)
        elif time.monotonic() - self._failed_since > self._ending.patience_s:
            self._end(json.loads(store.get("failure"))[0])

    def _answer(self) -> None:
        """This rank is missed by others: unless one of its machine sees to it, say what it is doing, and end."""
        store, rank = self._store.job, self._rank_info.rank
        if store is None or store.compare_set(f"asker/{rank}", "", str(rank)).decode() != str(rank):
            return
        own, where = self._neighbours.own, describe(*self._trace.where())
        assert own is not None
        answer = answer_of(
            rank,
            own.host,
            self._ending.timeout_s,
            where,
            self._trace.own_stacks(),
            self._ending.kept_in,
            "it has ended",
        )
        store.set(f"answer/{rank}", answer.dump())
        _exit()

    def _end(self, failure: str) -> None:
        """The loop waits for what does not come: tell what it cannot tell any more, and end."""
        if not self._ending.overtakes():
            return
        try:
            if self._ending.kept_in is not None:
                keep(self._trace.own_stacks(), self._ending.kept_in, self._rank_info.rank)
            if self._ending.speaks:
                self._ending.tell_failure(failure)
        finally:
            _exit()


def _exit() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # the terminal has gone
            stream.flush()
    os._exit(1)
