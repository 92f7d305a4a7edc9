"""The processes of a job's ranks, and the state of those on this rank's machine."""

import contextlib
import time

from runner.distributed.environment import RankInfo
from runner.distributed.failures.heartbeat import Heartbeat, RankProcess, state_of
from runner.distributed.world_store import WorldStore

STOPPED_S = 1.0  # a rank that is stopped for longer is expected to stay so


class LocalRanks:
    """The ranks on this machine.

    Attributes:
        own: this rank's process.
        others: the processes of the other ranks on this machine, by rank; empty before `discover`.
    """

    def __init__(self, rank_info: RankInfo, store: WorldStore, heartbeat: Heartbeat):
        self._rank_info, self._store, self._heartbeat = rank_info, store, heartbeat
        self.own: RankProcess | None = None
        self.others: dict[int, RankProcess] = {}

    def publish(self) -> None:
        """Write this rank's process into the store. All ranks must call it when a job starts."""
        self.others = {}
        if self._store.job is None:
            return
        self.own = self._heartbeat.start()
        self._store.job.set(f"rank/{self.own.rank}", self.own.dump())
        store = self._store.namespace("machine")
        store.set(f"{self.own.machine}/{store.add(self.own.machine, 1)}", self.own.dump())

    def discover(self) -> None:
        """Read the processes of the other ranks on this machine, once all ranks have published theirs."""
        if self.own is None or self._store.job is None:
            return
        store = self._store.namespace("machine")
        numbers = range(1, store.add(self.own.machine, 0) + 1)
        texts = store.multi_get([f"{self.own.machine}/{number}" for number in numbers])
        found = {process.rank: process for process in map(RankProcess.load, texts)}
        self.others = {rank: process for rank, process in found.items() if rank != self.own.rank}

    def find(self, rank: int) -> RankProcess | None:
        """Return a rank's process, also on another machine; None if the rank has not published it."""
        if rank in self.others:
            return self.others[rank]
        store = self._store.job
        with contextlib.suppress(RuntimeError):
            if store is not None and store.check([f"rank/{rank}"]):
                return RankProcess.load(store.get(f"rank/{rank}"))
        return None

    def is_local(self, process: RankProcess) -> bool:
        """Return True if the state of the process can be read, and it can be signalled."""
        return self.own is not None and process.machine == self.own.machine

    def exited(self) -> list[int]:
        """Return the ranks on this machine whose processes have exited."""
        return [rank for rank, process in self.others.items() if state_of(process) == "exited"]

    def stopped(self) -> list[RankProcess]:
        """Return the processes on this machine that a signal such as SIGSTOP has stopped.

        If any is stopped, sleep for STOPPED_S and check again, to ignore brief stops.
        """
        found = [process for process in self.others.values() if state_of(process) == "stopped"]
        if found:
            time.sleep(STOPPED_S)
        return [process for process in found if state_of(process) == "stopped"]

    def lowest_running(self, excluding: int | None = None) -> int:
        """Return the lowest rank that runs on this machine, including this one."""
        others = [rank for rank, process in self.others.items() if rank != excluding]
        return min([self._rank_info.rank, *(rank for rank in others if state_of(self.others[rank]) == "running")])
