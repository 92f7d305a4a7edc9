"""How a run ends on all ranks: the first failure is told as the cause, rank 0 speaks before any rank is gone."""

import time
from collections.abc import Callable
from datetime import timedelta

from runner.distributed.agreement import SPEAK_TIMEOUT_S
from runner.distributed.environment import RankInfo
from runner.distributed.peer_failure import ANSWER_TIMEOUT_S, first_failure, within
from runner.distributed.world_store import WorldStore


class Ending:
    """This rank's part in the end of a job, and of its world."""

    def __init__(self, rank_info: RankInfo, store: WorldStore):
        self._rank_info, self._store = rank_info, store
        self.failed = False  # the job, on this rank

    def report_failure(self, text: str, misses_peer: bool = False) -> str:
        """Tell the world why this rank fails; the first rank's text, which is the cause of the others'."""
        self.failed = True
        info, store = self._rank_info, self._store.job
        if store is None:
            return text
        told = within(ANSWER_TIMEOUT_S, lambda: first_failure(store, info.rank, info.world_size, text, misses_peer))
        if told is not None:
            return told
        self._store.drop()
        where = f"{info.master_addr}:{info.master_port}"
        return f"{text}\nand nothing answers at {where}, the ranks' store: that machine has ended or is cut off"

    def say_then_continue(self, say: Callable[[], None]) -> None:
        """Let rank 0 say something to the user; the others continue when it has, or after a bounded wait.

        A launcher that sees one rank exit with an error ends the others at once, rank 0 in mid-sentence too.
        """
        if self._rank_info.rank == 0:
            say()
        if self._store.root is None:
            return
        try:
            if self._rank_info.rank == 0:
                self._store.root.set("spoken", "")
            else:
                self._store.root.wait(["spoken"], timedelta(seconds=SPEAK_TIMEOUT_S))
        except RuntimeError:
            pass

    def close(self) -> None:
        """Leave the store; the rank that serves it stays until the others have left, or for a bounded time."""
        root = self._store.root
        if root is None:
            return
        try:
            root.add("closed", 1)
            if self._rank_info.hosts_store:
                deadline = time.monotonic() + SPEAK_TIMEOUT_S
                while root.add("closed", 0) < self._rank_info.world_size and time.monotonic() < deadline:
                    time.sleep(0.01)
        except RuntimeError:
            pass
        self._store.drop()
