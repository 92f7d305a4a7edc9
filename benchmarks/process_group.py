"""A benchmark's process as a rank of a world on one machine, with the process group of a job."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from runner.distributed.backend import Backend
from runner.distributed.environment import RankInfo
from runner.distributed.local.exchange import LocalExchange, exchange_of
from runner.distributed.world import World


@contextmanager
def process_group(rank: int, world_size: int, store: str) -> Iterator[LocalExchange]:
    """Form the process group, with one thread, and yield the exchange of the ranks. All ranks must enter and leave."""
    torch.set_num_threads(1)
    world = World(RankInfo(rank, rank, world_size, world_size), dist.FileStore(store, world_size), Backend())
    world.begin_job(world.backend)
    world.group.form(world.backend, world.device)
    exchange = exchange_of()
    assert exchange is not None, "this system has no sockets of the kind that the runner's exchanges need"
    yield exchange
    world.group.leave(went_well=True)
