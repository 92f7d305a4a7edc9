"""Exchanges of small tensors between the ranks of one machine."""

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from commands import wait_until
from one_machine import in_rank_order, no_gloo, on_ranks, separate_machines, values_of
from torch import nn

from runner.distributed.collectives import gather_over, max_over, sum_over
from runner.distributed.failures.peer_failure import PeerMissing, is_peer_failure
from runner.distributed.local import sockets as local_sockets
from runner.distributed.local.exchange import DTYPES, exchange_of, is_small
from runner.distributed.local.sockets import LARGEST, Listener, LocalSockets
from runner.distributed.sync_batch_norm import synchronize_batch_norm, use_group
from runner.distributed.traffic import CommunicationCounter
from runner.distributed.world import World


@pytest.mark.parametrize("world_size", [3, 5])
def test_exchanges_are_identical_on_all_ranks(world_size: int, tmp_path: Path) -> None:
    shapes = [(), (0,), (3, 5), (LARGEST // 16 // world_size,)]

    @no_gloo()
    def act(world: World) -> list[Any]:
        results: list[Any] = []
        for dtype in DTYPES:
            for shape in shapes:
                own = values_of(world.rank, dtype, *shape)
                total, largest, transposed = own.clone(), own.clone(), own.reshape(-1, 1).expand(-1, 2).clone().T
                with CommunicationCounter() as counter:
                    assert world.collectives.sum(total) is total
                    max_over(None, largest)
                    sum_over(None, transposed)
                    rows = gather_over(None, own)
                num_bytes = {"all_reduce": 3 * own.nbytes, "all_gather": 2 * world_size * own.nbytes}
                assert counter.bytes == num_bytes
                assert total.shape == largest.shape == shape and rows.shape == (world_size, *shape)
                results.append([total, largest, transposed, rows])
        return results

    results = on_ranks(tmp_path, world_size, act)
    expected = []
    for dtype in DTYPES:
        for shape in shapes:
            parts = [values_of(rank, dtype, *shape) for rank in range(world_size)]
            total = in_rank_order(parts)
            expected.append([total, torch.stack(parts).amax(0), total.reshape(1, -1).expand(2, -1), torch.stack(parts)])
    for result in results:
        for each, right in zip(result, expected, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(each, right, strict=True))


def test_several_votes_may_be_pending(tmp_path: Path) -> None:
    @no_gloo()
    def act(world: World) -> list[Any]:
        first = world.collectives.any_of_async(world.rank == 2, False)
        total = world.collectives.sum(torch.ones(3))
        second = world.collectives.any_of_async(False, world.rank == 0)
        world.collectives.any_async(True)  # the result is not read
        if world.rank == 1:  # the ranks reach them in different orders and at different times
            time.sleep(0.2)
            answers = [first(), second()]
        else:
            answers = [second(), first()][::-1]
        return [*answers, total.tolist(), world.collectives.any_async(False)()]

    expected = [[True, False], [False, True], [3.0] * 3, False]
    assert on_ranks(tmp_path, 3, act, num_jobs=2) == [expected] * 3


def test_large_tensors_are_gathered_by_the_process_group(tmp_path: Path) -> None:
    def act(world: World) -> torch.Size:
        assert exchange_of() is not None
        for tensor in (torch.ones(LARGEST // 8 + 1), torch.ones(2, dtype=torch.bfloat16), torch.ones(2).to_sparse()):
            assert not is_small(tensor, 2)
        assert not is_small(torch.ones(2, device="meta"), 2) and is_small(torch.ones(LARGEST // 8), 2)
        every_other = torch.arange(6.0)[::2]
        assert world.collectives.sum(every_other).tolist() == [0, 4, 8]
        return gather_over(None, torch.ones(LARGEST // 4)).shape

    assert on_ranks(tmp_path, 2, act) == [(2, LARGEST // 4)] * 2


def test_subgroup_exchanges_are_separate(tmp_path: Path) -> None:
    """SyncBatchNorm over two halves of the world, as in a pipeline, interleaved with exchanges of all ranks."""
    batch = torch.randn(8, 3, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def act(world: World) -> list[Any]:
        halves = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        layer = synchronize_batch_norm(nn.BatchNorm1d(3).double())
        use_group(layer, halves[world.rank % 2])  # type: ignore[arg-type]
        own = batch.split(4)[world.rank // 2].clone().requires_grad_()
        with no_gloo():
            vote = world.collectives.any_async(world.rank == 3)
            output = layer(own * (1 + world.rank % 2))
            world.collectives.sum(torch.ones(1))
            output.square().cumsum(0).sum().backward()
            return [output.detach(), own.grad, vote()]

    results = on_ranks(tmp_path, 4, act)
    for half in (0, 1):
        whole = batch.clone().requires_grad_()
        output = nn.BatchNorm1d(3).double()(whole * (1 + half))
        sum(part.square().cumsum(0).sum() for part in output.split(4)).backward()
        for rank in (half, half + 2):
            place = slice(0, 4) if rank < 2 else slice(4, 8)
            torch.testing.assert_close(results[rank][0], output.detach()[place], rtol=1e-12, atol=1e-12)
            assert whole.grad is not None
            torch.testing.assert_close(results[rank][1], whole.grad[place], rtol=1e-12, atol=1e-12)
            assert results[rank][2] is True


@pytest.mark.parametrize("dies", [True, False])
def test_missing_rank_ends_the_wait_of_all(dies: bool, tmp_path: Path) -> None:
    """At once if it has died, although a child of it lives on; after the timeout if it hangs."""

    def act(world: World) -> str:
        exchange = exchange_of()
        assert exchange is not None
        exchange._sockets._timeout_s = 60.0 if dies else 1.0
        if world.rank == 1:
            # The rank's process must exit cleanly here: its child inherits the connections and keeps them open.
            worker = os.fork()
            if worker == 0:
                time.sleep(600)
            if dies:
                exchange._sockets.close()
            wait_until(lambda: len(list(tmp_path.glob("failed*"))) == 2)
            os.kill(worker, 9)
            os.waitpid(worker, 0)
            return ""
        with pytest.raises(PeerMissing) as caught:
            world.collectives.sum(torch.ones(1))
        (tmp_path / f"failed{world.rank}").touch()
        return str(caught.value)

    reported = on_ranks(tmp_path, 3, act)
    cause = "rank 1 has closed its connection to this one" if dies else "rank 1 has sent nothing for 1 s"
    assert cause in reported and all(reported[::2])


def test_unknown_processes_are_not_connected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    join = Listener.join

    def join_beside_strays(self: Listener, *args: Any) -> LocalSockets:
        unknown = [stray(self, user) for user in (None, 65534) if user is None or os.geteuid() == 0]
        try:
            return join(self, *args)
        finally:
            assert [os.waitpid(pid, 0)[1] for pid in unknown] == [0] * len(unknown)  # each was rejected

    def stray(listener: Listener, user: int | None) -> int:
        connected, reported = os.pipe()
        if pid := os.fork():
            os.close(reported)
            assert os.read(connected, 1)
            os.close(connected)
            return pid
        try:
            listener.close()
            if user is not None:
                os.setuid(user)
            with local_sockets._new() as connection:
                connection.connect(local_sockets._address(listener._own))
                connection.settimeout(60)
                os.write(reported, b"!")
                os._exit(0 if connection.recv(1) == b"" else 1)
        except OSError as error:
            os._exit(0 if isinstance(error, ConnectionResetError) else 2)

    monkeypatch.setattr(Listener, "join", join_beside_strays)
    assert on_ranks(tmp_path, 2, lambda world: world.collectives.sum(torch.ones(1)).item()) == [2.0] * 2


def test_only_groups_on_one_machine_use_sockets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    separate_machines(monkeypatch, num_ranks=2)

    def act(world: World) -> list[Any]:
        machines, across = [dist.new_group([0, 1]), dist.new_group([2, 3])], dist.new_group([1, 2])
        machine = machines[world.rank // 2]
        own = torch.tensor([float(world.rank)])
        sum_over(machine, own)
        assert exchange_of(machine) is not None and exchange_of() is None
        assert world.rank in (0, 3) or exchange_of(across) is None  # type: ignore[arg-type]
        return [own.item(), world.collectives.sum(torch.ones(1)).item(), world.collectives.any_async(False)()]

    assert on_ranks(tmp_path, 4, act) == [[1.0, 4.0, False]] * 2 + [[5.0, 4.0, False]] * 2


def test_cause_decides_if_an_error_is_a_peer_failure() -> None:
    """A pipeline's stage raises an error of its own."""
    error = RuntimeError("stage 1 failed to run forward")
    assert not is_peer_failure(error)
    error.__cause__ = PeerMissing("rank 1 has closed its connection to this one")
    assert is_peer_failure(error)
