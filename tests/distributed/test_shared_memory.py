"""Sums of large tensors in memory that the ranks of one machine share."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from one_machine import no_gloo, on_ranks, values_of
from torch import Tensor

from runner.distributed.collectives import sum_over
from runner.distributed.failures.peer_failure import PeerMissing
from runner.distributed.local.shared_memory import PIECE
from runner.distributed.local.sockets import LARGEST, LocalSockets
from runner.distributed.traffic import CommunicationCounter
from runner.distributed.world import World

LARGE = LARGEST // 4 + 1  # four-byte numbers, too many for a message


def mappings() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:runner")


@pytest.mark.parametrize("world_size", [3, pytest.param(5, marks=pytest.mark.soak)])
def test_large_sums_are_identical_to_gloo(world_size: int, tmp_path: Path) -> None:
    several_pieces = (3, PIECE // 8 // 3 + 7)  # in float64
    kinds = [(torch.float64, several_pieces), (torch.float32, (PIECE // 8 + 1,))]
    kinds += [(dtype, (LARGE,)) for dtype in (torch.float32, torch.bfloat16, torch.int64)]

    def act(world: World) -> tuple[list[Tensor], list[Tensor]]:
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
        world.collectives.sum(torch.ones(LARGE))  # the first one creates the memory and includes a vote on it
        for dtype, shape in kinds:
            own = values_of(world.rank, dtype, *shape)
            with CommunicationCounter() as counter:
                assert world.collectives.sum(own) is own
            assert counter.bytes == {"all_reduce": own.nbytes}
            results.append(own)
        transposed = values_of(world.rank, torch.float32, 3, LARGE).T
        sum_over(None, transposed)
        assert mappings() == 1
        # Small enough for a message, but of a dtype that messages do not support.
        small = [world.collectives.sum(values_of(world.rank, torch.bfloat16, size)) for size in (5, 0)]
        return [*results, transposed, *small]

    for result, by_gloo in on_ranks(tmp_path, world_size, act, num_jobs=2):
        assert all(torch.equal(a, b) for a, b in zip(result, by_gloo, strict=True))


def test_groups_use_separate_memory(tmp_path: Path) -> None:
    def act(world: World) -> list[float]:
        halves = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        own = torch.full((LARGE,), float(world.rank))
        with no_gloo():
            vote = world.collectives.any_async(world.rank == 3)
            sum_over(halves[world.rank % 2], own)  # type: ignore[arg-type]
            whole = world.collectives.sum(own.clone())
            assert vote() and mappings() == 2
        return [*own.unique().tolist(), *whole.unique().tolist()]

    assert on_ranks(tmp_path, 4, act) == [[2.0, 12.0], [4.0, 12.0]] * 2


def test_other_tensors_are_summed_by_gloo(tmp_path: Path) -> None:
    def act(world: World) -> list[float]:
        rows = torch.eye(2, LARGE)[world.rank].expand(2, -1).to_sparse()
        sum_over(None, rows)
        return rows.to_dense().sum(1).tolist()

    assert on_ranks(tmp_path, 2, act) == [[2.0, 2.0]] * 2


def test_sums_of_different_sizes_are_refused(tmp_path: Path) -> None:
    def act(world: World) -> str:
        with pytest.raises(RuntimeError) as caught:
            world.collectives.sum(torch.ones(LARGE + world.rank))
        return str(caught.value)

    sizes = [4 * LARGE, 4 * LARGE + 4]
    assert on_ranks(tmp_path, 2, act) == [
        f"rank {1 - rank} sums {sizes[1 - rank]} bytes, but this rank sums {sizes[rank]}" for rank in (0, 1)
    ]


@pytest.mark.parametrize("num_sent", [0, 1, 2, 4])
def test_missing_rank_ends_the_sum_of_all(num_sent: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sum has two pieces. For each piece, a rank twice sends a message to each of the two others."""

    def act(world: World) -> str:
        world.collectives.sum(torch.ones(LARGE))  # the first one creates the memory
        send, sent = LocalSockets.send, list[Any]()

        def send_or_die(self: LocalSockets, *message: Any) -> None:
            if world.rank == 1 and len(sent) == num_sent:
                self.close()
                raise InterruptedError
            sent.append(message)
            send(self, *message)

        monkeypatch.setattr(LocalSockets, "send", send_or_die)
        with pytest.raises((PeerMissing, InterruptedError)) as caught:
            world.collectives.sum(torch.ones(PIECE // 2))
        return str(caught.value)

    assert "rank 1 has closed its connection to this one" in on_ranks(tmp_path, 3, act)
