"""A process of a benchmark as a rank of a world on one machine, with the process group that a job has."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from runner.distributed.backend import Backend
from runner.distributed.environment import RankInfo
from runner.distributed.local_exchange import LocalExchange, exchange_of
from runner.distributed.world import World


@contextmanager
def formed_world(rank: int, world_size: int, store: str) -> Iterator[LocalExchange]:
    """One thread of torch. Gives what the ranks exchange by; all must enter and leave together."""
    torch.set_num_threads(1)
    world = World(RankInfo(rank, rank, world_size, world_size), dist.FileStore(store, world_size), Backend())
    world.begin_job(world.backend)
    world.group.form(world.backend, world.device)
    exchange = exchange_of()
    assert exchange is not None, "this system has no sockets of the kind that the runner's exchanges need"
    yield exchange
    world.group.leave(went_well=True)
