"""Consensus, votes and reports of the ranks of a world."""

import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from commands import wait_until
from ranks import run_ranks

from runner.distributed.backend import Backend
from runner.distributed.environment import RankInfo
from runner.distributed.failures.signals import handling_signals
from runner.distributed.process_group import make_mesh
from runner.distributed.world import World
from runner.errors import InputError, Preempted


def world_of(rank: int, world_size: int, path: Path, timeout_s: float = 30) -> World:
    rank_info = RankInfo(rank, rank, world_size, world_size, source="test")
    world = World(rank_info, dist.FileStore(str(path / "agreement"), world_size), Backend(timeout_s=timeout_s))
    world.begin_job(world.backend)
    return world


def test_first_error_is_that_of_the_lowest_rank(tmp_path: Path) -> None:
    def on_rank(rank: int, world_size: int) -> list[list[str]]:
        world = world_of(rank, world_size, tmp_path)
        time.sleep(0.1 * (world_size - rank))  # rank 0 arrives last
        return [
            world.consensus.first_error("nobody", []),
            world.consensus.first_error("two", [f"rank {rank}"] if rank in (1, 3) else []),
        ]

    assert run_ranks(on_rank, 4) == [[[], ["rank 1"]]] * 4


def test_missing_rank_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runner.distributed.store_consensus.REPORT_TIMEOUT_S", 1.0)

    def on_rank(rank: int, world_size: int) -> str | None:
        world = world_of(rank, world_size, tmp_path, timeout_s=3)
        if rank == 0:
            wait_until((tmp_path / "asks").exists)
            with pytest.raises(TimeoutError) as caught:
                world.consensus.first_error("question", [])
            return str(caught.value)
        if rank == 1:
            (tmp_path / "asks").touch()
            with pytest.raises((RuntimeError, TimeoutError)):  # rank 0 has exited with its store, or is silent
                world.consensus.first_error("question", [])
        return None

    assert "rank 2 of 3 did not respond (question) within backend.timeout_s=3 s" in run_ranks(on_rank, 3)[0]


def test_broadcast_returns_or_raises_on_all_ranks(tmp_path: Path) -> None:
    def on_rank(rank: int, world_size: int) -> list[str]:
        world = world_of(rank, world_size, tmp_path)
        results = [world.consensus.broadcast("value", lambda: f"made on {rank}")]
        for error in (OSError(f"no space on {rank}"), InputError("seed=x", "epochs=x")):

            def refuse(error: Exception = error) -> str:
                raise error

            with pytest.raises(ValueError, match=r"no space|seed") as caught:
                world.consensus.broadcast(type(error).__name__, refuse)
            results.append(repr(caught.value))
        return results

    expected = ["made on 0", "ValueError('no space on 0')", repr(InputError("seed=x", "epochs=x"))]
    assert run_ranks(on_rank, 3) == [expected] * 3


def test_jobs_use_separate_keys(tmp_path: Path) -> None:
    def on_rank(rank: int, world_size: int) -> list[str]:
        world = world_of(rank, world_size, tmp_path)
        received = []
        for job in range(3):
            world.begin_job(world.backend)
            received.append(world.consensus.broadcast("value", lambda job=job: str(job)))  # type: ignore[misc]
        return received

    assert run_ranks(on_rank, 2) == [["0", "1", "2"]] * 2


def test_values_kept_by_any_agent_are_known_after_a_restart(tmp_path: Path) -> None:
    """Rank 0 may be on a machine that joined at the restart, and a world of one on any that is left."""

    def begin(rank: int, world_size: int, restart: int, nodes: list[str]) -> tuple[str | None, str]:
        restart_file = str(tmp_path / nodes[rank])
        rank_info = RankInfo(rank, 0, world_size, 1, source="test", restart_file=restart_file)
        store = dist.FileStore(str(tmp_path / f"store{restart}"), world_size) if world_size > 1 else None
        world = World(rank_info, store, Backend(timeout_s=30))
        world.begin_job(world.backend)
        world.consensus.load_kept()
        before = world.consensus.before_restart("directory")
        directory = before or world.consensus.broadcast("directory", lambda: f"made at start {restart}")
        world.consensus.keep_for_restart("directory", directory)
        return before, directory

    first = "made at start 0"
    assert run_ranks(begin, 2, 0, ["a", "b"], forms_group=False) == [(None, first)] * 2
    assert run_ranks(begin, 2, 1, ["anew", "b"], forms_group=False) == [(first, first)] * 2
    assert [run_ranks(begin, 1, 2, [left], forms_group=False) for left in ("anew", "b")] == [[(first, first)]] * 2


def test_one_rank_per_machine_runs_first(tmp_path: Path) -> None:
    def act(rank: int, world_size: int) -> float:
        local_rank = rank % 2  # two nodes of two ranks
        rank_info = RankInfo(rank, local_rank, world_size, 2, source="test")
        world = World(rank_info, dist.FileStore(str(tmp_path / "turns"), world_size), Backend())
        times: list[float] = []

        def note() -> None:
            time.sleep(0.05)
            times.append(time.monotonic())

        world.consensus.run_in_order("download", note)
        return times[0]

    first, second, third, fourth = run_ranks(act, 4)
    assert first < third < min(second, fourth)


def test_flag_on_any_rank_is_set_on_all(tmp_path: Path) -> None:
    def on_rank(rank: int, world_size: int) -> list[bool]:
        world = world_of(rank, world_size, tmp_path)
        return [world.collectives.any_async(rank == 1)(), world.collectives.any_async(False)()]

    assert run_ranks(on_rank, 3) == [[True, False]] * 3


@pytest.mark.fault("a process group that cannot be destroyed", outcome="survived")
def test_group_that_cannot_be_destroyed_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    let_go = threading.Event()
    monkeypatch.setattr("runner.distributed.process_group.DESTROY_S", 0.2)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: let_go.wait(60))
    monkeypatch.setattr(logging.getLogger("runner"), "propagate", True)
    try:
        World(RankInfo(), None, Backend()).group.leave(went_well=True)
    finally:
        let_go.set()
    assert "the process group could not be destroyed within 0.2 s" in caplog.text


def test_all_groups_have_the_timeout_of_the_backend(tmp_path: Path) -> None:
    def on_rank(rank: int, world_size: int) -> list[float]:
        world = world_of(rank, world_size, tmp_path, timeout_s=77)
        world.group.form(world.backend, world.device)
        mesh = make_mesh(world.device, shard=2, tensor=2)
        groups = [dist.new_group([0, 1, 2]), dist.new_subgroups(1)[0], *mesh.get_all_groups()]
        groups.append(mesh._flatten().get_group())
        own = [group for group in groups if isinstance(group, dist.ProcessGroup)]
        timeouts = [group._get_backend(world.device).options._timeout.total_seconds() for group in own]  # type: ignore[attr-defined]
        world.group.leave(went_well=True)
        return timeouts

    timeout = dist.distributed_c10d._get_default_timeout
    assert run_ranks(on_rank, 4, forms_group=False) == [[77.0] * 5] * 3 + [[77.0] * 4]
    assert dist.distributed_c10d._get_default_timeout is timeout


WAITS: dict[str, Callable[[World], object]] = {
    "cores": lambda world: world.consensus.gather_from_machine("cores", "0"),
    "processes": lambda world: world.local_ranks.discover(),
    "addresses": lambda world: world.store.gather("addresses", "127.0.0.1"),
    "consensus": lambda world: world.consensus.first_error("refused", []),
}


@pytest.mark.fault("a signal to one rank while another one waits for it at the start", outcome="refused")
@pytest.mark.parametrize("signaled", [0, 1])
@pytest.mark.parametrize("what", WAITS)
def test_a_signal_to_any_rank_ends_a_wait_of_the_start(
    what: str, signaled: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 never does what rank 0 waits for. A launcher signals rank 0 once it has noticed the exit of rank 1."""
    monkeypatch.setattr("runner.distributed.world_store.STOP_GRACE_S", 0.1)

    def on_rank(rank: int, world_size: int) -> None:
        rank_info = RankInfo(rank, rank, world_size, world_size, source="test")
        world = World(rank_info, dist.FileStore(str(tmp_path / "store"), world_size), Backend())
        if rank == 1:
            wait_until((tmp_path / "waits").exists)
            if signaled == 1:
                world.shutdown.report_stop("SIGTERM")
            wait_until((tmp_path / "ended").exists)
            return
        with handling_signals():
            world.begin_job(world.backend)
            (tmp_path / "waits").touch()
            if signaled == 0:
                threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
            with pytest.raises(Preempted, match="SIGTERM"):
                WAITS[what](world)
        (tmp_path / "ended").touch()

    run_ranks(on_rank, 2, forms_group=False, timeout_s=100)


def test_users_of_the_store_do_not_share_keys(tmp_path: Path) -> None:
    def on_rank(rank: int, world_size: int) -> list[Any]:
        world = world_of(rank, world_size, tmp_path)
        own = world.store.namespace("hosts")
        if rank == 0:
            for key in ("0", "1", "all"):
                own.set(key, "its own")
        found = world.consensus.first_error("hosts", ["of the consensus"] if rank == 1 else [])
        return [found, world.store.gather("hosts", f"of rank {rank}"), *(own.get(key) for key in ("0", "1", "all"))]

    expected = [["of the consensus"], ["of rank 0", "of rank 1"], *[b"its own"] * 3]
    assert run_ranks(on_rank, 2, forms_group=False) == [expected] * 2
