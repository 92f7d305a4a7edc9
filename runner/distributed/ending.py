"""How a run ends on all ranks: the first failure is told as the cause, rank 0 speaks before any rank is gone."""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist

from runner.distributed.agreement import SPEAK_TIMEOUT_S
from runner.distributed.environment import RankInfo
from runner.distributed.hung_rank import describe
from runner.distributed.neighbours import Neighbours
from runner.distributed.parent import PARENT_ENDED
from runner.distributed.peer_failure import ANSWER_TIMEOUT_S, Witness, within
from runner.distributed.rank_trace import RankTrace
from runner.distributed.signals import received
from runner.distributed.stopping import stop, stopped
from runner.distributed.world_store import ANSWER_S, WorldStore

PATIENCE_S = 5.0  # for a loop that waits for a rank which has failed, to find that out by itself
T = TypeVar("T")


class Ending:
    """This rank's part in the end of a job, and of its world.

    failed: the job, on this rank. speaks: this rank tells the user, as rank 0 does unless that has gone or hangs.
    kept_in: the folder for the stacks of hung ranks, once there is a run directory. tell_failure: says it and
    records it, in the place of a loop that is stuck or of rank 0. is_recorded: whether a rank has recorded the end.
    """

    def __init__(self, rank_info: RankInfo, store: WorldStore, neighbours: Neighbours, trace: RankTrace):
        self._rank_info, self._store, self._neighbours, self._trace = rank_info, store, neighbours, trace
        self.begin_job(0.0)

    def begin_job(self, timeout_s: float) -> None:
        self.failed, self.speaks, self.timeout_s = False, self._rank_info.rank == 0, timeout_s
        self._speaker, self._num_missing = 0, 0  # ranks that were killed, or are on a machine that has gone
        self._has_store = True
        self._begins = threading.Lock()
        self.kept_in: Path | None = None
        self.patience_s = PATIENCE_S
        self.tell_failure: Callable[[str], None] = lambda text: None
        self.is_recorded: Callable[[], bool] = lambda: True

    def report_failure(self, text: str, misses_peer: bool = False, at: str = "") -> str:
        """Tell the world why this rank fails; the first rank's text, which is the cause of the others'.

        at: where in the code this rank was.
        """
        with self._begins:
            self.failed = True
        info, store = self._rank_info, self._store.job
        if store is None:
            return text
        witness = Witness(info.rank, info.world_size, store, self._neighbours, self.timeout_s, self.kept_in)
        at = f"{describe(*self._trace.where())}, at {at}" if at else ""
        told = None
        if self._store_answers():
            told = within(ANSWER_TIMEOUT_S, lambda: witness.first_failure(text, at, misses_peer))
        if told is None:
            self._store.drop()
            gone = self._neighbours.gone()
            self._speaker = self._neighbours.lowest_here()
            self.speaks = info.rank == self._speaker
            where = f"{info.master_addr}:{info.master_port}"
            lines = [text, *witness.of_dead(gone)]
            if self.speaks:
                lines += witness.of_stopped()
            if not gone or info.world_size > 1 + len(self._neighbours.here):
                lines.append(f"and nothing answers at {where}, the ranks' store: that machine has ended or is cut off")
            return "\n".join(lines)
        first, missing = told
        self._speaker = min(set(range(info.world_size)) - set(missing), default=0)
        self.speaks = info.rank == self._speaker and self._may_tell()
        self._num_missing = len(missing)
        return first

    def overtakes(self) -> bool:
        """Whether this rank ends by another thread than its loop's, which has not come to it, and will not any more."""
        self._begins.acquire()  # for good: a loop that comes to its end now waits for that of the process
        if self.failed:
            self._begins.release()
            return False
        self.speaks = self._rank_info.rank == 0 and self._may_tell()
        return True

    def stands_in(self) -> bool:
        """Whether this rank, which was not to speak, tells a failure after all: who was has ended before, or hangs.

        To be asked out of the group, by whose end the others find out. A rank that is being killed has lost its
        connections a moment before it has ended.
        """
        if self.speaks:
            self._count_told(1)
            return False
        deadline = time.monotonic() + SPEAK_TIMEOUT_S
        while True:
            is_late = time.monotonic() > deadline
            gone = self._neighbours.gone()  # asked first: what one that is gone has told is there now
            if self._count_told(0) or self.is_recorded():
                return False
            if is_late or self._speaker in gone:
                before, self._speaker = self._speaker, self._neighbours.lowest_here(but=self._speaker)
                if self._rank_info.rank == self._speaker:
                    self.speaks = self._may_tell(before) and self._count_told(1) <= 1
                    return self.speaks
                if is_late:
                    return False
            time.sleep(0.02)

    def _may_tell(self, before: int | None = None) -> bool:
        """Whether no other rank has set out to tell the failure, but the one before; True without a store."""
        store, own = self._store.job, str(self._rank_info.rank)

        def first(store: dist.Store) -> str:
            teller = store.compare_set("teller", "", own).decode()
            if teller == str(before):
                teller = store.compare_set("teller", teller, own).decode()
            return teller

        return store is None or self._asked(lambda: first(store)) in (own, None)

    def _count_told(self, more: int) -> int:
        """How many ranks have told the failure, these included; 0 without a store."""
        store = self._store.job
        return 0 if store is None else self._asked(lambda: store.add("told", more)) or 0

    def _asked(self, ask: Callable[[], T]) -> T | None:
        """What the store says; None where it does not answer."""
        told = within(ANSWER_S, ask)
        if told is None:
            self._store.drop()  # torch tells in thirty lines each time that it does not answer
        return told

    def report_stop(self, why: str) -> None:
        """Tell the world that this rank stops, asked by a signal, where the others do not expect it."""
        self.failed = True
        root = self._store.root
        if self._store_answers():
            within(ANSWER_TIMEOUT_S, lambda: stop(root, why))

    def stopped(self) -> str | None:
        """Why a rank has stopped that this one misses; None where it has not said so."""
        root = self._store.root
        told = within(ANSWER_TIMEOUT_S, lambda: stopped(root) or "") if self._store_answers() else None
        if told is None:  # it may have ended together with what started the ranks
            return PARENT_ENDED if received() == PARENT_ENDED else None
        return told or None

    def _store_answers(self) -> bool:
        """Whether the store does; one that has not is not asked again."""
        root = self._store.root
        if not self._has_store or root is None or not self._store.answers():
            self._has_store = False
        else:  # where its process is stopped, the system still takes connections
            self._has_store = within(ANSWER_S, lambda: root.check(["spoken"])) is not None
        return self._has_store

    def say_then_continue(self, say: Callable[[], None]) -> None:
        """Let the rank that speaks say something to the user; the others go on when it has, or after a bounded wait.

        A launcher that sees one rank exit with an error ends the others at once, rank 0 in mid-sentence too.
        """
        if self.speaks:
            say()
        if self._store.root is None:
            return
        try:
            if self.speaks:
                self._store.root.set("spoken", "")
            else:
                self._await_speech(self._store.root)
        except RuntimeError:
            pass

    def _await_speech(self, root: dist.Store) -> None:
        deadline = time.monotonic() + SPEAK_TIMEOUT_S
        while time.monotonic() < deadline:
            has_gone = self._speaker in self._neighbours.gone()  # an agent may end it as soon as it has told
            if has_gone or root.check(["spoken"]):
                return
            time.sleep(0.02)

    def close(self) -> None:
        """Leave the store; the rank that serves it stays until the others have left, or for a bounded time."""
        root = self._store.root
        if root is None:
            return
        try:
            root.add("closed", 1)
            if self._rank_info.hosts_store:
                deadline = time.monotonic() + SPEAK_TIMEOUT_S
                others = self._rank_info.world_size - self._num_missing
                while root.add("closed", 0) < others and not self._is_last() and time.monotonic() < deadline:
                    time.sleep(0.01)
        except RuntimeError:
            pass
        self._store.drop()

    def _is_last(self) -> bool:
        return 0 < self._rank_info.world_size - 1 == len(self._neighbours.here) == len(self._neighbours.gone())
