"""Consensus of the ranks through their store, without a process group."""

import json
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from runner.distributed.environment import RankInfo
from runner.distributed.world_store import RanksMissing, WorldStore
from runner.errors import InputError

KEYS = "agreed"  # in front of each topic
REPORT_TIMEOUT_S = 15.0  # by which ranks wait longer for rank 0 than rank 0 waits for them
_COMPOSING = "composing its configuration"
_ACTIVITIES = {"composed": _COMPOSING, "input": _COMPOSING, "refused": "building its model and data"}  # by topic


class StoreConsensus:
    """The consensus of the ranks of a world. In a world of one rank, that rank decides."""

    def __init__(self, rank_info: RankInfo, store: WorldStore, timeout_s: float):
        self._rank_info, self._store, self.timeout_s = rank_info, store, timeout_s
        self._kept: dict[str, str] = {}

    @contextmanager
    def waiting_longer(self, timeout_s: float) -> Iterator[None]:
        """Within the context, wait at least this many seconds for other ranks."""
        before, self.timeout_s = self.timeout_s, max(self.timeout_s, timeout_s)
        try:
            yield
        finally:
            self.timeout_s = before

    def first_error(self, topic: str, messages: list[str]) -> list[str]:
        """Return the messages of the lowest rank that has any, on every rank. All ranks must call it.

        Raises RanksMissing if a rank does not call it in time, and Preempted if a signal stopped a rank.
        """
        store, rank = self._store.job, self._rank_info.rank
        if store is None:
            return messages
        agreed = f"{KEYS}/{topic}/all"
        store.set(f"{KEYS}/{topic}/{rank}", json.dumps(messages))
        if rank == 0:
            store.set(agreed, json.dumps(self._collect(topic)))
        # Rank 0 sets the key after it has waited for all ranks. So a rank waits a little longer for rank 0.
        if not self._store.wait_for([agreed], time.monotonic() + self.timeout_s + REPORT_TIMEOUT_S):
            raise self._store.ranks_missing([0], _describe(topic), self.timeout_s)
        result: str | list[str] = json.loads(store.get(agreed))
        if isinstance(result, str):
            raise RanksMissing(result, is_reporter=rank == 0)
        return result

    def broadcast(self, topic: str, make: Callable[[], Any]) -> Any:
        """Return what `make` returns on rank 0, a value for JSON, on every rank. All ranks must call it.

        Raises InputError on every rank if `make` does, and ValueError if `make` raises another ValueError or OSError.
        """
        result = list[str]()
        if self._rank_info.rank == 0:
            try:
                result = ["value", json.dumps(make())]
            except InputError as error:
                result = ["input error", str(error)]
            except (ValueError, OSError) as error:
                result = ["error", str(error)]
        kind, text = self.first_error(topic, result)
        if kind == "value":
            return json.loads(text)
        raise InputError(*text.splitlines()) if kind == "input error" else ValueError(text)

    def keep_for_restart(self, topic: str, value: str) -> None:
        """Keep a value for `before_restart`, in the restart file of each agent."""
        if self._rank_info.local_rank == 0 and (file := self._store.restart_file()) is not None:
            partial = file.with_name(f"{file.name}.tmp")
            partial.write_text(json.dumps(_read(file) | {topic: value}))
            partial.replace(file)

    def load_kept(self) -> None:
        """Load the values that the agent of any machine keeps for this job. All ranks must call it when the job starts.

        A machine that joined at the restart has kept nothing, and may have rank 0.
        """
        if (file := self._store.restart_file()) is not None:
            own = _read(file)
            found = self.first_error("recalled", [json.dumps(own)] if own else [])
            self._kept = json.loads(found[0]) if found else {}

    def before_restart(self, topic: str) -> str | None:
        """Return the value kept under the topic before the agent restarted this world; None if there is none."""
        return self._kept.get(topic)

    def run_in_order(self, topic: str, function: Callable[[], None]) -> None:
        """Call `function` on rank 0, then on the first rank of each other machine, then on the rest.

        So later ranks find a file that an earlier rank has downloaded into a shared directory. All ranks must call it,
        and `function` must not raise.
        """
        rank, local_rank = self._rank_info.rank, self._rank_info.local_rank
        for number, is_turn in enumerate((rank == 0, rank != 0 and local_rank == 0, local_rank != 0)):
            if is_turn:
                function()
            self.first_error(f"{topic}/turn{number}", [])

    def gather_from_machine(self, topic: str, text: str) -> list[str]:
        """Return the texts of the other ranks on this machine. All ranks must call it."""
        own, host = self._rank_info.rank, socket.gethostname()
        found = map(json.loads, self._store.gather(topic, json.dumps([host, text])))
        return [other for rank, (place, other) in enumerate(found) if place == host and rank != own]

    def _collect(self, topic: str) -> list[str] | str:
        """Return the messages of the lowest rank that has any, or a line about ranks that are missing."""
        store, keys = self._store.job, [f"{KEYS}/{topic}/{rank}" for rank in range(self._rank_info.world_size)]
        assert store is not None
        if not self._store.wait_for(keys, time.monotonic() + self.timeout_s):
            missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
            if missing:
                return str(self._store.ranks_missing(missing, _describe(topic), self.timeout_s))
        messages = (json.loads(text) for text in store.multi_get(keys))
        return next((each for each in messages if each), [])


def _describe(topic: str) -> str:
    return f"did not finish {_ACTIVITIES[topic]}" if topic in _ACTIVITIES else f"did not respond ({topic})"


def _read(restart_file: Path) -> dict[str, str]:
    return json.loads(restart_file.read_text()) if restart_file.exists() else {}
