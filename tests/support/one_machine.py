"""Ranks on one machine that form their process group as a job does, and tensors to exchange."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from commands import sockets_of
from ranks import run_ranks
from torch import Tensor

from runner.distributed.backend import Backend
from runner.distributed.environment import RankInfo
from runner.distributed.failures.heartbeat import Heartbeat, RankProcess
from runner.distributed.local.exchange import exchange_of
from runner.distributed.world import World


def on_ranks(path: Path, world_size: int, act: Callable[[World], Any], num_jobs: int = 1) -> list[Any]:
    """Run `num_jobs` jobs in a world on one machine. Return the result of `act` of the last job for each rank."""

    def of(rank: int, world_size: int) -> Any:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        rank_info = RankInfo(rank, rank, world_size, world_size, source="test")
        world = World(rank_info, dist.FileStore(str(path / "store"), world_size), Backend(timeout_s=60))
        before = sockets_of(os.getpid())
        for _ in range(num_jobs):
            world.begin_job(world.backend)
            world.group.form(world.backend, world.device)
            result = act(world)
            world.group.leave(went_well=True)
            assert exchange_of() is None and sockets_of(os.getpid()) == before
        return result

    return run_ranks(of, world_size, forms_group=False)


def separate_machines(monkeypatch: pytest.MonkeyPatch, num_ranks: int = 1) -> None:
    """Let every `num_ranks` ranks be on a machine of their own."""
    start = Heartbeat.start

    def start_there(self: Heartbeat) -> RankProcess:
        process = start(self)
        return process._replace(machine=f"machine {process.rank // num_ranks}")

    monkeypatch.setattr(Heartbeat, "start", start_there)


def values_of(rank: int, dtype: torch.dtype, *shape: int) -> Tensor:
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)
    return (1e3 * drawn).to(dtype)


def in_rank_order(tensors: list[Tensor]) -> Tensor:
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        total += tensor
    return total


@contextmanager
def no_gloo() -> Iterator[None]:
    """Let gloo's collectives fail during the block."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("all_reduce", "all_gather"):
            patch.setattr(dist, name, lambda *args, **kwargs: pytest.fail("uses gloo"))
        yield
