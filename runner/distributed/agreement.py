"""What the ranks agree on through their store, before there is a process group."""

import contextlib
import json
import socket
import time
from collections.abc import Callable, Iterator

import torch.distributed as dist

from runner.distributed.environment import RankInfo
from runner.distributed.stopping import stopped
from runner.distributed.world_store import WorldStore
from runner.errors import Preempted

SPEAK_TIMEOUT_S = 15.0  # that ranks wait for rank 0 beyond what it waits for them
# What the ranks do before they meet under a topic.
DOING = {"composed": "composing its configuration", "refused": "building its model and data"}


class RanksAbsent(TimeoutError):
    """Ranks have not come to where the others agree on something. told: this rank tells it, for all of them."""

    def __init__(self, text: str, told: bool):
        super().__init__(text)
        self.told = told


class Agreement:
    """In a world of one, what this rank says is what all say."""

    def __init__(self, rank_info: RankInfo, store: WorldStore, timeout_s: float):
        self._rank_info, self._store, self.timeout_s = rank_info, store, timeout_s
        self._recalled: dict[str, str] = {}

    def first_error(self, topic: str, messages: list[str]) -> list[str]:
        """The messages of the lowest rank that has any, on every rank. All ranks must call it."""
        store, rank = self._store.job, self._rank_info.rank
        if store is None:
            return messages
        store.set(f"{topic}/{rank}", json.dumps(messages))
        if rank == 0:
            store.set(f"{topic}/all", json.dumps(self._verdict(topic)))
        verdict = json.loads(self._get(f"{topic}/all", topic))
        if isinstance(verdict, str):
            raise RanksAbsent(verdict, told=rank == 0)
        return verdict

    def wait_for_all(self, topic: str) -> None:
        """Return once all ranks have come here, or cannot be waited for: the store's machine may be gone."""
        if self._store.answers():
            with contextlib.suppress(RuntimeError, TimeoutError):
                self.first_error(topic, [])

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
        return made if self._store.job is None else self._get(topic, topic)

    def share_once(self, topic: str, make: Callable[[], str]) -> str:
        """As share; a world that its agent has started again gets what the first one made."""

        def make_once() -> str:
            if (before := self.made_before(topic)) is not None:
                return before
            made = make()
            self.keep(topic, made)
            return made

        made = self.share(topic, make_once)
        self.keep(topic, made)
        return made

    def keep(self, topic: str, made: str) -> None:
        """For `made_before`, should the agents start this world again: each rank for its own node's."""
        if (memory := self._store.memory()) is not None:
            if self._rank_info.local_rank == 0:
                memory.keep(topic, made)
        elif self._rank_info.rank == 0 and (kept := self._store.kept()) is not None:
            kept.set(topic, made)

    def recall(self) -> None:
        """Have each rank know what the agent of any node keeps of this job. All ranks must call it, as it begins.

        A node that has come anew knows nothing, and may have rank 0.
        """
        if (memory := self._store.memory()) is not None:
            own = memory.read()
            found = self.first_error("recalled", [json.dumps(own)] if own else [])
            self._recalled = json.loads(found[0]) if found else {}

    def made_before(self, topic: str) -> str | None:
        """What `share_once` made, or was kept, before the agent started this world again; for one rank."""
        if self._rank_info.memory is not None:
            return self._recalled.get(topic)
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
        others = [number for number in range(1, self._rank_info.local_world_size + 1) if number != own]
        return _texts(store, [f"{host}/{other}" for other in others])

    def _verdict(self, topic: str) -> list[str] | str:
        """The messages of the lowest rank that has any; a line about ranks that have not come in time."""
        store, keys = self._store.job, [f"{topic}/{rank}" for rank in range(self._rank_info.world_size)]
        assert store is not None
        deadline = time.monotonic() + self.timeout_s
        if not self._come(keys, deadline):
            absent = [rank for rank, key in enumerate(keys) if not self._come([key], deadline)]
            if absent:
                return self._of_absent(absent, topic)
        verdicts = (json.loads(text) for text in _texts(store, keys))
        return next((verdict for verdict in verdicts if verdict), [])

    def _get(self, key: str, topic: str) -> str:
        store, own = self._store.job, str(self._rank_info.rank)
        assert store is not None
        # Rank 0 answers after it has waited for everybody, so a rank that waits for rank 0 waits a little longer.
        if not self._come([key], time.monotonic() + self.timeout_s + SPEAK_TIMEOUT_S):
            told = store.compare_set("absent", "", own).decode() == own
            raise RanksAbsent(self._of_absent([0], topic), told)
        return store.get(key).decode()

    def _of_absent(self, ranks: list[int], topic: str) -> str:
        who = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
        what = f"did not finish {DOING[topic]}" if topic in DOING else f"said nothing ({topic})"
        return f"{who} of {self._rank_info.world_size} {what} within backend.timeout_s={self.timeout_s:g} s"

    def _come(self, keys: list[str], deadline: float) -> bool:
        """Whether all are set in time. Raises Preempted where a rank was asked to stop, which answers no more."""
        store, pause = self._store.job, 0.001
        assert store is not None
        while not (found := store.check(keys)) and time.monotonic() < deadline:
            if why := stopped(self._store.root):
                raise Preempted(why)
            time.sleep(pause)
            pause = min(2 * pause, 0.02)
        return found


def _texts(store: dist.Store, keys: list[str]) -> Iterator[str]:
    """What is set there, waited for when the first is read: in one operation of the store, however many they are."""
    yield from (text.decode() for text in store.multi_get(keys))
