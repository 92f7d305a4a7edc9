"""One rank's view of its world: who it is, its devices, and what it does together with the other ranks."""

import torch
import torch.distributed as dist

from runner.distributed.agreement import Agreement
from runner.distributed.backend import Backend
from runner.distributed.collectives import Collectives
from runner.distributed.ending import Ending
from runner.distributed.environment import RankInfo
from runner.distributed.neighbours import Neighbours
from runner.distributed.process_group import ProcessGroup
from runner.distributed.rank_trace import RankTrace
from runner.distributed.watch import Watch
from runner.distributed.world_store import WorldStore


class World:
    """It is joined once per process; each job of a sweep then forms a process group of its own.

    `connection` is None in a world of one.
    """

    def __init__(self, rank_info: RankInfo, connection: dist.Store | None, backend: Backend):
        self.rank_info, self.backend = rank_info, backend
        self.rank, self.world_size = rank_info.rank, rank_info.world_size
        self.devices = [torch.device("cpu")]  # all that are this rank's own
        self.store = WorldStore(rank_info, connection)
        self.trace = RankTrace(rank_info.rank)
        self.neighbours = Neighbours(rank_info, self.store, self.trace)
        self.agreement = Agreement(rank_info, self.store, backend.timeout_s)
        self.group = ProcessGroup(rank_info, self.store, self.neighbours)
        self.collectives = Collectives(rank_info.world_size)
        self.ending = Ending(rank_info, self.store, self.neighbours, self.trace)
        self.watch = Watch(rank_info, self.store, self.neighbours, self.trace, self.ending)

    @property
    def device(self) -> torch.device:
        """Where the samples are."""
        return self.devices[0]

    def begin_job(self, backend: Backend) -> None:
        """Start a job with keys of its own in the store. All ranks must call it."""
        self.backend, self.agreement.timeout_s = backend, backend.timeout_s
        self.store.begin_job()
        self.neighbours.publish()
        self.ending.begin_job(backend.timeout_s)
