"""What the ranks agree on through their store, before there is a process group."""

import json
import socket
import time
from collections.abc import Callable, Iterator
from datetime import timedelta

from runner.distributed.environment import RankInfo
from runner.distributed.world_store import WorldStore

SPEAK_TIMEOUT_S = 15.0  # that ranks wait for rank 0 beyond what it waits for them


class Agreement:
    """In a world of one, what this rank says is what all say."""

    def __init__(self, rank_info: RankInfo, store: WorldStore, timeout_s: float):
        self._rank_info, self._store, self.timeout_s = rank_info, store, timeout_s

    def first_error(self, topic: str, messages: list[str]) -> list[str]:
        """The messages of the lowest rank that has any, on every rank. All ranks must call it."""
        store, rank = self._store.job, self._rank_info.rank
        if store is None:
            return messages
        store.set(f"{topic}/{rank}", json.dumps(messages))
        if rank == 0:
            verdicts = self._all_ranks(topic)
            store.set(f"{topic}/all", json.dumps(next((v for v in verdicts if v), [])))
        return json.loads(self._get(f"{topic}/all"))

    def share(self, topic: str, make: Callable[[], str]) -> str:
        """What `make` returned on rank 0, on every rank. All ranks must call it.

        Raises ValueError on every rank when it raised a ValueError or an OSError on rank 0.
        """
        made, refused = "", []
        if self._rank_info.rank == 0:
            try:
                made = make()
            except (ValueError, OSError) as error:
                refused.append(str(error))
            if self._store.job is not None:
                self._store.job.set(topic, made)
        if refused := self.first_error(f"{topic}/made", refused):
            raise ValueError(refused[0])
        return made if self._store.job is None else self._get(topic)

    def share_once(self, topic: str, make: Callable[[], str]) -> str:
        """As share; a world that its agent has started again gets what the first one made."""
        kept = self._store.kept()
        if kept is None:
            return self.share(topic, make)

        def make_once() -> str:
            if (before := self.made_before(topic)) is not None:
                return before
            made = make()
            kept.set(topic, made)
            return made

        return self.share(topic, make_once)

    def made_before(self, topic: str) -> str | None:
        """What `share_once` made before the agent started this world again; for one rank."""
        kept = self._store.kept()
        if kept is None or not self._rank_info.restart or not kept.check([topic]):
            return None
        return kept.get(topic).decode()

    def in_turn(self, topic: str, act: Callable[[], None]) -> None:
        """Act on rank 0, then on the first rank of every other node, then on the rest. All ranks must call it.

        What the first has fetched into a shared folder is there for the next. An act must not raise.
        """
        rank, local_rank = self._rank_info.rank, self._rank_info.local_rank
        turns = (rank == 0, rank != 0 and local_rank == 0, local_rank != 0)
        for number, mine in enumerate(turns):
            if mine:
                act()
            self.first_error(f"{topic}/turn{number}", [])

    def others_here(self, topic: str, text: str) -> Iterator[str]:
        """What the other ranks on this machine say, waited for as it is read. All ranks must call it."""
        store, host = self._store.topic(topic), socket.gethostname()
        own = store.add(host, 1)  # not by local_rank: people give several ranks the same, with a GPU of their own each
        store.set(f"{host}/{own}", text)
        numbers = range(1, self._rank_info.local_world_size + 1)
        return (store.get(f"{host}/{other}").decode() for other in numbers if other != own)

    def _all_ranks(self, topic: str) -> list[list[str]]:
        store, world_size = self._store.job, self._rank_info.world_size
        assert store is not None
        deadline = time.monotonic() + self.timeout_s
        verdicts, absent = [], []
        for rank in range(world_size):
            left = timedelta(seconds=max(deadline - time.monotonic(), 0.01))
            try:
                store.wait([f"{topic}/{rank}"], left)
            except RuntimeError:
                absent.append(rank)
                continue
            verdicts.append(json.loads(store.get(f"{topic}/{rank}")))
        if absent:
            raise TimeoutError(f"ranks {absent} of {world_size} said nothing ({topic}) for {self.timeout_s:g} s")
        return verdicts

    def _get(self, key: str) -> str:
        assert self._store.job is not None
        # Rank 0 answers after it has waited for everybody, so a rank that waits for rank 0 waits a little longer.
        self._store.job.wait([key], timedelta(seconds=self.timeout_s + SPEAK_TIMEOUT_S))
        return self._store.job.get(key).decode()
