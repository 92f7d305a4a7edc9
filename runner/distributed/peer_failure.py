"""How a rank that fails finds out, by the store, which rank failed first, and which have gone or hang."""

import contextlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist

from runner.distributed.hung_rank import STACKS_S, Answer, ask_and_end, end_stopped
from runner.distributed.left_waiting import start_waiting
from runner.distributed.neighbours import Neighbours

LAST_WORD_S = 4.0  # for ranks that miss the same peer as this one, to say so
ANSWER_TIMEOUT_S = LAST_WORD_S + 2 * STACKS_S + 5.0  # for the store, whose machine may be gone
# Errors of gloo and of RPC are plain RuntimeErrors, most of which name a file of their own.
SAID_OF_PEERS = (
    "gloo/",
    "caused pair closure",
    "Connection closed by peer",
    "Connection reset by peer",
    "tensorpipe/",
    "RPC ran for more than set timeout",
)
T = TypeVar("T")


class PeerMissing(RuntimeError):
    """Another rank no longer answers."""


def misses_peer(error: BaseException) -> bool:
    """Whether it is about a rank that no longer answers: whoever raises it is not the cause."""
    if isinstance(error, (dist.DistError, PeerMissing)):
        return True
    if isinstance(error, RuntimeError) and any(words in str(error) for words in SAID_OF_PEERS):
        return True
    return error.__cause__ is not None and misses_peer(error.__cause__)  # a pipeline's schedule names its own instead


@dataclass(frozen=True)
class Witness:
    """A rank that fails, and what it goes by.

    store: the job's own. kept_in: where stacks of hung ranks are kept, if there is a run directory.
    """

    rank: int
    world_size: int
    store: dist.Store
    neighbours: Neighbours
    timeout_s: float
    kept_in: Path | None = None

    def first_failure(self, text: str, at: str, misses_peer: bool) -> tuple[str, list[int]]:
        """The text of the rank that failed first, the cause of the others'; and the ranks that will say nothing more.

        at: where this rank is. One that misses a peer adds whom.
        """
        store, missing = self.store, list[int]()
        if self._is_asked():
            # What it says, now that it goes on, is no cause; it is ended.
            _wait_for(lambda: store.check(["failure"]), time.monotonic() + 2 * STACKS_S)
        elif misses_peer:
            store.set(f"failed/{self.rank}", at)
            silent, dead = self._silent()
            if not store.check(["failure"]):
                missing = dead or silent
                text += "\n" + ("\n".join(self.of_dead(dead)) if dead else self._of_silent(silent))
        told = store.compare_set("failure", "", json.dumps([text, missing])).decode()
        store.set(
            f"failed/{self.rank}", at
        )  # no earlier, of a cause: who finds that all have failed believes there is none
        first, missing = json.loads(told)
        return first, sorted({*missing, *self._dead()})

    def _silent(self) -> tuple[list[int], list[int]]:
        """The ranks that have not failed when all had the time to, and those of them whose processes have ended.

        These are the cause, and are not waited for: others may be on their way.
        """
        deadline = time.monotonic() + LAST_WORD_S
        while True:
            dead = self._dead()
            silent = [rank for rank in range(self.world_size) if not self._has_failed(rank)]
            over = self.store.check(["failure"]) or self.store.check(["asked"]) or time.monotonic() > deadline
            if dead or not silent or over:
                return silent, dead
            time.sleep(0.05)

    def _dead(self) -> list[int]:
        """The ranks of this machine that have ended without a word."""
        return [rank for rank in self.neighbours.gone() if not self._has_failed(rank)]

    def _has_failed(self, rank: int) -> bool:
        return self.store.check([f"failed/{rank}"])

    def of_dead(self, ranks: list[int]) -> list[str]:
        """A line for each of these ranks of this machine, whose processes have ended."""
        return [
            f"no word from rank {rank} on {process.host}: its process {process.pid} has ended"
            for rank in ranks
            for process in (self.neighbours.here[rank],)
        ]

    def of_stopped(self) -> list[str]:
        """A line for each rank of this machine that is stopped, which ends it; with one the store may have stopped."""
        return [end_stopped(process, self.timeout_s) for process in self.neighbours.stopped()]

    def _of_silent(self, silent: list[int]) -> str:
        """What is found out of ranks that say nothing; whoever is on a rank's machine asks it, and ends it."""
        self.store.set("asked", json.dumps(silent))
        deadline = time.monotonic() + 2 * STACKS_S  # for all of them
        for rank in silent:
            process = self.neighbours.find(rank)
            if process is not None and self.neighbours.is_here(process) and self._is_mine(rank):
                self.store.set(f"answer/{rank}", ask_and_end(process, self.timeout_s, self.kept_in).dump())
        answers = {rank: self._answer(rank, deadline) for rank in silent}
        causes = [rank for rank in silent if not answers[rank].is_waiting] or silent
        lines = [answers[rank].stacks for rank in causes if answers[rank].stacks]
        lines += self._of_waiting()
        return "\n".join(lines + [answers[rank].line for rank in sorted(silent, key=causes.__contains__)])

    def _is_asked(self) -> bool:
        """Whether another rank has found this one silent."""
        return self.store.check([f"asker/{self.rank}"])

    def _is_mine(self, rank: int) -> bool:
        return self.store.compare_set(f"asker/{rank}", "", str(self.rank)).decode() == str(self.rank)

    def _answer(self, rank: int, deadline: float) -> Answer:
        _wait_for(lambda: self.store.check([f"answer/{rank}"]) or self.store.check(["failure"]), deadline)
        if not self.store.check([f"answer/{rank}"]):
            return Answer(f"no word from rank {rank} on {self.neighbours.host_of(rank)}")
        return Answer.load(self.store.get(f"answer/{rank}").decode())

    def _of_waiting(self) -> list[str]:
        """Where the ranks are that have failed as this one has, equal ones in one line."""
        ranks_at: dict[str, list[int]] = {}
        for rank in range(self.world_size):
            if self._has_failed(rank) and (at := self.store.get(f"failed/{rank}").decode()):
                ranks_at.setdefault(at, []).append(rank)
        return [
            f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))} waited in vain, {at}"
            for at, ranks in ranks_at.items()
        ]


def _wait_for(holds: Callable[[], bool], deadline: float) -> None:
    """Until it holds, or the deadline."""
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.05)


def within(timeout_s: float, act: Callable[[], T]) -> T | None:
    """What it returns; None where it raises a RuntimeError or takes longer, as asking a store that is cut off does."""
    answers: list[T] = []

    def ask() -> None:
        with contextlib.suppress(RuntimeError):
            answers.append(act())

    start_waiting(ask, "store").join(timeout_s)
    return answers[0] if answers else None
