"""The processes of a job's ranks, and the state of those on this rank's machine."""

import json
import socket

from runner.distributed.environment import RankInfo
from runner.distributed.failures.heartbeat import Heartbeat, RankProcess, state_of
from runner.distributed.world_store import WorldStore


class LocalRanks:
    """The ranks' processes, in particular those on this machine."""

    def __init__(self, rank_info: RankInfo, store: WorldStore, heartbeat: Heartbeat):
        self._rank_info, self._store, self._heartbeat = rank_info, store, heartbeat
        self.own: RankProcess | None = None  # None in a world of one rank
        self.all: dict[int, RankProcess] = {}  # of all ranks, by rank; empty before `discover`
        # Of the other ranks on this machine. This rank can read their state and signal them.
        self.others: dict[int, RankProcess] = {}

    def publish(self) -> None:
        """Write this rank's process into the store. All ranks must call it when a job starts."""
        self.all, self.others = {}, {}
        if self._store.job is not None:
            self.own = self._heartbeat.start()
            self._store.publish("processes", json.dumps(self.own))

    def discover(self) -> None:
        """Read the processes of all ranks. All ranks must have called `publish`."""
        own, self.all = self.own, dict(enumerate(self._read()))
        if own is None:
            return
        others = [process for process in self.all.values() if process.machine == own.machine and process != own]
        self.others = {process.rank: process for process in others}

    def hosts(self) -> list[str]:
        """Return the names of the machines, in the order of their ranks. All ranks must have called `publish`."""
        processes = self._read()
        return list(dict.fromkeys(process.host for process in processes)) or [socket.gethostname()]

    def _read(self) -> list[RankProcess]:
        """Return the processes of all ranks from the store; none in a world of one rank."""
        return [RankProcess(*json.loads(text)) for text in self._store.published("processes")]

    def exited(self) -> list[int]:
        """Return the ranks on this machine whose processes have exited."""
        return [rank for rank, process in self.others.items() if state_of(process) == "exited"]

    def lowest_running(self, excluding: int | None = None) -> int:
        """Return the lowest rank that runs on this machine, including this one."""
        others = [rank for rank, process in self.others.items() if state_of(process) == "running"]
        return min([self._rank_info.rank, *(rank for rank in others if rank != excluding)])
