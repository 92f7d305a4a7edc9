"""Which processes the ranks of a job are, and what can be found out of those on this rank's machine."""

import contextlib
import signal
import time

import torch.distributed as dist

from runner.distributed.environment import RankInfo
from runner.distributed.rank_trace import RankProcess, RankTrace, send, state_of
from runner.distributed.world_store import WorldStore

STOPPED_S = 1.0  # after which a rank that is stopped is taken to stay so


class Neighbours:
    """own: this rank's process. here: those of the other ranks on this machine, by rank; none before `meet`."""

    def __init__(self, rank_info: RankInfo, store: WorldStore, trace: RankTrace):
        self._rank_info, self._store, self._trace = rank_info, store, trace
        self.own: RankProcess | None = None
        self.here: dict[int, RankProcess] = {}

    def publish(self) -> None:
        """Say which process this rank is. All ranks must call it as a job begins."""
        self.here = {}
        if self._store.job is None:
            return
        self.own = self._trace.open()
        self._store.job.set(f"rank/{self.own.rank}", self.own.dump())
        machine = self._store.topic("machine")
        number = machine.add(self.own.place, 1)
        machine.set(f"{self.own.place}/{number}", self.own.dump())

    def meet(self) -> None:
        """Learn of the others on this machine, when all ranks have published."""
        if self.own is None or self._store.job is None:
            return
        machine = self._store.topic("machine")
        numbers = range(1, machine.add(self.own.place, 0) + 1)
        texts = machine.multi_get([f"{self.own.place}/{number}" for number in numbers])
        found = [RankProcess.load(text.decode()) for text in texts]
        self.here = {process.rank: process for process in found if process.rank != self.own.rank}

    def find(self, rank: int) -> RankProcess | None:
        """A rank's process, asked of the store where it is not one of this machine; None for one that never came."""
        if rank in self.here:
            return self.here[rank]
        store: dist.Store | None = self._store.job
        with contextlib.suppress(RuntimeError):
            if store is not None and store.check([f"rank/{rank}"]):
                return RankProcess.load(store.get(f"rank/{rank}").decode())
        return None

    def host_of(self, rank: int) -> str:
        process = self.find(rank)
        return "an unknown host" if process is None else process.host

    def is_here(self, process: RankProcess) -> bool:
        """Whether its state can be read, and it can be signalled."""
        return self.own is not None and process.place == self.own.place

    def gone(self) -> list[int]:
        """The ranks of this machine whose processes have ended."""
        return [rank for rank, process in self.here.items() if state_of(process) == "gone"]

    def stopped(self) -> list[RankProcess]:
        """Those of this machine that a signal has stopped, and not for a moment alone."""
        found = [process for process in self.here.values() if state_of(process) == "stopped"]
        if found:
            time.sleep(STOPPED_S)
        return [process for process in found if state_of(process) == "stopped"]

    def lowest_here(self, but: int | None = None) -> int:
        """The lowest rank that runs on this machine, this one included."""
        living = [rank for rank, process in self.here.items() if rank != but and state_of(process) == "running"]
        return min([self._rank_info.rank, *living])


def kill(process: RankProcess) -> None:
    """End a process of this place."""
    send(process, signal.SIGKILL)
