"""Sums that no message takes, through memory that the ranks of one machine share."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from one_machine import no_gloo, on_ranks, values_of
from torch import Tensor

from runner.distributed import shared_memory
from runner.distributed.collectives import sum_over
from runner.distributed.local_exchange import exchange_of
from runner.distributed.local_sockets import LARGEST
from runner.distributed.peer_failure import PeerMissing
from runner.distributed.shared_memory import PIECE
from runner.distributed.traffic import CommunicationCounter
from runner.distributed.world import World

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64)
LARGE = LARGEST // 4 + 1  # numbers of four bytes that no message takes


def mappings() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:runner")


@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_a_large_sum_is_that_of_gloo_to_the_bit_on_all(world_size: int, tmp_path: Path) -> None:
    shapes = [(LARGE,), (3, 2 * PIECE // 8 // 3 + 7), (PIECE // 8,), (PIECE // 8 + 1,), (PIECE + 3,)]

    def act(world: World) -> tuple[list[Tensor], list[Tensor]]:
        kinds = [(dtype, shape) for dtype in DTYPES for shape in shapes]
        by_gloo = [values_of(world.rank, dtype, *shape) for dtype, shape in kinds]
        by_gloo += [
            values_of(world.rank, torch.float32, 3, LARGE).T.contiguous(),
            values_of(world.rank, torch.bfloat16, 5),
            torch.empty(0, dtype=torch.bfloat16),
        ]
        for own in by_gloo:
            dist.all_reduce(own)
        return summed(world), by_gloo

    @no_gloo()
    def summed(world: World) -> list[Tensor]:
        results: list[Tensor] = []
        world.collectives.sum(torch.ones(LARGE))  # the first one makes the memory, and counts a vote about that
        for dtype in DTYPES:
            for shape in shapes:
                own = values_of(world.rank, dtype, *shape)
                with CommunicationCounter() as counter:
                    assert world.collectives.sum(own) is own
                assert counter.bytes == {"all_reduce": own.nbytes}
                results.append(own)
        turned = values_of(world.rank, torch.float32, 3, LARGE).T
        sum_over(None, turned)
        assert mappings() == 1
        # Smaller than what goes into a message, of a kind that does not.
        small = [world.collectives.sum(values_of(world.rank, torch.bfloat16, size)) for size in (5, 0)]
        return [*results, turned, *small]

    for result, by_gloo in on_ranks(tmp_path, world_size, act, num_jobs=2):
        assert all(torch.equal(a, b) for a, b in zip(result, by_gloo, strict=True))


def test_groups_have_memory_of_their_own(tmp_path: Path) -> None:
    def act(world: World) -> list[float]:
        halves = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        own = torch.full((LARGE,), float(world.rank))
        with no_gloo():
            vote = world.collectives.any_later(world.rank == 3)
            sum_over(halves[world.rank % 2], own)  # type: ignore[arg-type]
            whole = world.collectives.sum(own.clone())
            assert vote() and mappings() == 2
        return [*own.unique().tolist(), *whole.unique().tolist()]

    assert on_ranks(tmp_path, 4, act) == [[2.0, 12.0], [4.0, 12.0]] * 2


def test_no_memory_is_left_when_the_group_is(tmp_path: Path) -> None:
    def act(world: World) -> int:
        before = mappings()  # of the job before
        world.collectives.sum(torch.ones(LARGE))
        return before

    assert on_ranks(tmp_path, 2, act, num_jobs=2) == [0, 0]


@pytest.mark.parametrize("lacks", ["file", "mapping"])
def test_where_one_rank_has_no_memory_all_sum_by_gloo(
    lacks: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def act(world: World) -> list[Any]:
        if lacks == "file":
            monkeypatch.delattr(os, "memfd_create")
        elif world.rank == 1:
            monkeypatch.setattr(shared_memory.mmap, "mmap", refuse)
        total = world.collectives.sum(torch.ones(LARGE))
        with pytest.raises(pytest.fail.Exception, match="goes through gloo"), no_gloo():
            world.collectives.sum(torch.ones(LARGE))
        return [total.unique().tolist(), mappings(), world.collectives.sum(torch.ones(1)).item()]

    def refuse(*args: Any) -> None:
        raise OSError("no room for it")

    assert on_ranks(tmp_path, 3, act) == [[[3.0], 0, 3.0]] * 3


def test_what_is_no_plain_tensor_of_the_cpu_is_summed_by_gloo(tmp_path: Path) -> None:
    def act(world: World) -> list[float]:
        rows = torch.eye(2, LARGE)[world.rank].expand(2, -1).to_sparse()
        sum_over(None, rows)
        return rows.to_dense().sum(1).tolist()

    assert on_ranks(tmp_path, 2, act) == [[2.0, 2.0]] * 2


def test_ranks_that_sum_different_sizes_are_told(tmp_path: Path) -> None:
    def act(world: World) -> str:
        with pytest.raises(RuntimeError) as caught:
            world.collectives.sum(torch.ones(LARGE + world.rank))
        return str(caught.value)

    sizes = [4 * LARGE, 4 * LARGE + 4]
    assert on_ranks(tmp_path, 2, act) == [
        f"rank {1 - rank} sums {sizes[1 - rank]} bytes where this one sums {sizes[rank]}" for rank in (0, 1)
    ]


@pytest.mark.parametrize("die", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("waits", [1, 2, 3])
def test_a_rank_that_does_not_come_ends_the_sum_of_all(waits: int, die: signal.Signals, tmp_path: Path) -> None:
    """Before one of the waits of a sum of two pieces: at once where it has died, at the time-out where it hangs."""

    def act(world: World) -> str:
        exchange = exchange_of()
        assert exchange is not None
        exchange.sum_large(torch.ones(LARGE))
        assert exchange._memory is not None
        if die is signal.SIGSTOP:
            exchange._sockets._timeout_s = 2.0
        wait_for_all, count = exchange._memory._wait_for_all, 0

        def wait_or_die(num_bytes: int) -> None:
            nonlocal count
            count += 1
            if world.rank == 1 and count == waits:
                if die is signal.SIGKILL:
                    exchange._sockets.close()
                while len(list(tmp_path.glob("told*"))) < 2:
                    time.sleep(0.05)
                raise InterruptedError
            wait_for_all(num_bytes)

        exchange._memory._wait_for_all = wait_or_die
        with pytest.raises((PeerMissing, InterruptedError)) as caught:
            world.collectives.sum(torch.ones(PIECE // 2))
        if world.rank != 1:
            (tmp_path / f"told{world.rank}").touch()
        return str(caught.value)

    told = on_ranks(tmp_path, 3, act)
    said = "has sent nothing for 2 s" if die is signal.SIGSTOP else "has closed its connection to this one"
    assert any(f"rank 1 {said}" == text for text in told)
    assert told[1] == "" and told[0] and told[2]
