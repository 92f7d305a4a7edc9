"""One rank's view of its world: its identity and devices, and everything that it does together with the other ranks."""

import torch
import torch.distributed as dist

from runner.distributed.backend import Backend
from runner.distributed.collectives import Collectives
from runner.distributed.environment import RankInfo
from runner.distributed.failures.heartbeat import Heartbeat
from runner.distributed.failures.shutdown import Shutdown
from runner.distributed.failures.watchdog import Watchdog
from runner.distributed.local.local_ranks import LocalRanks
from runner.distributed.process_group import ProcessGroup
from runner.distributed.readings import Readings
from runner.distributed.store_consensus import StoreConsensus
from runner.distributed.world_store import WorldStore


class World:
    """The world of this process, which joins it once. Each job of a sweep forms its own process group."""

    def __init__(self, rank_info: RankInfo, connection: dist.Store | None, backend: Backend):
        self.rank_info, self.backend = rank_info, backend
        self.rank, self.world_size = rank_info.rank, rank_info.world_size
        self.devices = [torch.device("cpu")]  # all devices that belong to this rank
        self.store = WorldStore(rank_info, connection)
        self.heartbeat = Heartbeat(rank_info.rank)
        self.local_ranks = LocalRanks(rank_info, self.store, self.heartbeat)
        self.store.timeout_s = backend.timeout_s
        self.consensus = StoreConsensus(rank_info, self.store, backend.timeout_s)
        self.group = ProcessGroup(rank_info, self.store, self.local_ranks)
        self.collectives = Collectives(rank_info.world_size)
        self.readings = Readings()
        self.shutdown = Shutdown(rank_info, self.store, self.local_ranks, self.heartbeat)
        self.watchdog = Watchdog(rank_info, self.store, self.local_ranks, self.heartbeat, self.shutdown)

    @property
    def device(self) -> torch.device:
        """The device of the samples."""
        return self.devices[0]

    def begin_job(self, backend: Backend) -> None:
        """Start a job, with new keys in the store. All ranks must call it."""
        self.backend, self.consensus.timeout_s, self.store.timeout_s = backend, backend.timeout_s, backend.timeout_s
        self.readings = Readings()  # a failed job may have left some
        self.store.begin_job()
        self.local_ranks.publish()
        self.shutdown.begin_job(backend.timeout_s)
