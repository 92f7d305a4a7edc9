"""How ranks agree, share, take turns, vote, and tell why they fail."""

import logging
import threading
import time
from pathlib import Path

import pytest
import torch.distributed as dist
from commands import wait_until
from ranks import run_ranks

from runner.distributed.backend import Backend
from runner.distributed.environment import RankInfo
from runner.distributed.world import World


def world_of(rank: int, world_size: int, path: Path, timeout_s: float = 30) -> World:
    rank_info = RankInfo(rank, rank, world_size, world_size, found="test")
    world = World(rank_info, dist.FileStore(str(path / "agreement"), world_size), Backend(timeout_s=timeout_s))
    world.begin_job(world.backend)
    return world


def test_all_hear_the_lowest_rank_that_objects(tmp_path: Path) -> None:
    def ask(rank: int, world_size: int) -> list[list[str]]:
        world = world_of(rank, world_size, tmp_path)
        time.sleep(0.1 * (world_size - rank))  # rank 0 is the last to come
        return [
            world.agreement.first_error("nobody", []),
            world.agreement.first_error("two", [f"rank {rank}"] if rank in (1, 3) else []),
        ]

    assert run_ranks(ask, 4) == [[[], ["rank 1"]]] * 4


def test_a_rank_that_does_not_come_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runner.distributed.agreement.SPEAK_TIMEOUT_S", 1.0)

    def ask(rank: int, world_size: int) -> str | None:
        world = world_of(rank, world_size, tmp_path, timeout_s=3)
        if rank == 0:
            wait_until((tmp_path / "asks").exists)
            with pytest.raises(TimeoutError) as caught:
                world.agreement.first_error("question", [])
            return str(caught.value)
        if rank == 1:
            (tmp_path / "asks").touch()
            with pytest.raises((RuntimeError, TimeoutError)):  # as rank 0 is gone with its store, or only silent
                world.agreement.first_error("question", [])
        return None

    assert "rank 2 of 3 said nothing (question) within backend.timeout_s=3 s" in run_ranks(ask, 3)[0]


def test_what_rank_0_makes_is_shared_and_so_is_its_failure(tmp_path: Path) -> None:
    def ask(rank: int, world_size: int) -> tuple[str, str]:
        world = world_of(rank, world_size, tmp_path)

        def refuse() -> str:
            raise OSError(f"no room on {rank}")

        made = world.agreement.share("value", lambda: f"made on {rank}")
        with pytest.raises(ValueError, match="no room") as caught:
            world.agreement.share("trouble", refuse)
        return made, str(caught.value)

    assert run_ranks(ask, 3) == [("made on 0", "no room on 0")] * 3


def test_jobs_of_one_world_do_not_read_each_others_keys(tmp_path: Path) -> None:
    def ask(rank: int, world_size: int) -> list[str]:
        world = world_of(rank, world_size, tmp_path)
        heard = []
        for job in range(3):
            world.begin_job(world.backend)
            heard.append(world.agreement.share("value", lambda job=job: str(job)))  # type: ignore[misc]
        return heard

    assert run_ranks(ask, 2) == [["0", "1", "2"]] * 2


def test_what_the_agent_of_any_node_keeps_is_known_after_a_restart(tmp_path: Path) -> None:
    """Rank 0 may be on a node that has come anew, and a world of one on any that is left."""

    def begin(rank: int, world_size: int, restart: int, nodes: list[str]) -> tuple[str | None, str]:
        memory = str(tmp_path / nodes[rank])
        rank_info = RankInfo(rank, 0, world_size, 1, found="test", memory=memory)
        store = dist.FileStore(str(tmp_path / f"store{restart}"), world_size) if world_size > 1 else None
        world = World(rank_info, store, Backend(timeout_s=30))
        world.begin_job(world.backend)
        world.agreement.recall()
        before = world.agreement.made_before("directory")
        return before, world.agreement.share_once("directory", lambda: f"made at start {restart}")

    first = "made at start 0"
    assert run_ranks(begin, 2, 0, ["a", "b"], forms_group=False) == [(None, first)] * 2
    assert run_ranks(begin, 2, 1, ["anew", "b"], forms_group=False) == [(first, first)] * 2
    assert [run_ranks(begin, 1, 2, [left], forms_group=False) for left in ("anew", "b")] == [[(first, first)]] * 2


def test_one_rank_per_node_goes_first(tmp_path: Path) -> None:
    def act(rank: int, world_size: int) -> float:
        local_rank = rank % 2  # two nodes of two ranks
        rank_info = RankInfo(rank, local_rank, world_size, 2, found="test")
        world = World(rank_info, dist.FileStore(str(tmp_path / "turns"), world_size), Backend())
        times: list[float] = []

        def note() -> None:
            time.sleep(0.05)
            times.append(time.monotonic())

        world.agreement.in_turn("download", note)
        return times[0]

    first, second, third, fourth = run_ranks(act, 4)
    assert first < third < min(second, fourth)


def test_the_first_failure_is_the_cause(tmp_path: Path) -> None:
    def fail(rank: int, world_size: int) -> str:
        world = world_of(rank, world_size, tmp_path)
        told = world.ending.report_failure(f"of {rank}") if rank == 2 else None
        dist.barrier()
        return told or world.ending.report_failure(f"of {rank}")

    assert run_ranks(fail, 3) == ["of 2"] * 3


def test_a_flag_on_any_rank_is_everybodys(tmp_path: Path) -> None:
    def ask(rank: int, world_size: int) -> list[bool]:
        world = world_of(rank, world_size, tmp_path)
        return [world.collectives.any_later(rank == 1)(), world.collectives.any_later(False)()]

    assert run_ranks(ask, 3) == [[True, False]] * 3


@pytest.mark.fault("a process group that cannot be left", outcome="survived")
def test_a_group_that_cannot_be_destroyed_is_given_up(
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
    assert "the process group could not be left within 0.2 s" in caplog.text
