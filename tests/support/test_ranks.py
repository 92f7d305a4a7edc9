"""The guarantees of `run_ranks` and of kept ranks that other tests rely on."""

import multiprocessing
import os
import time
from pathlib import Path

import pytest
from ranks import KeptRanks, RankError, kept_ranks, run_ranks


def test_a_failing_rank_terminates_the_others_and_is_named(tmp_path: Path) -> None:
    def fail(rank: int, world_size: int) -> None:
        if rank == 1:
            raise KeyError("lost key")
        time.sleep(60)
        (tmp_path / "waited for").touch()

    with pytest.raises(RankError, match=r"rank 1 failed[\s\S]*in fail[\s\S]*KeyError: 'lost key'") as caught:
        run_ranks(fail, 2)
    assert "rank 0" not in str(caught.value)
    assert not (tmp_path / "waited for").exists()
    assert {process.pid for process in multiprocessing.active_children()} <= kept_ranks.pids


def test_a_hung_rank_is_killed_and_its_stack_shown(tmp_path: Path) -> None:
    def hang(rank: int, world_size: int) -> None:
        if rank == 1:
            (tmp_path / "pid").write_text(str(os.getpid()))
            time.sleep(60)

    with pytest.raises(RankError, match=r"rank 1 still ran after 5 s[\s\S]* in hang") as caught:
        run_ranks(hang, 2, timeout_s=5)
    assert "rank 0" not in str(caught.value)
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def write_pid(rank: int, world_size: int, folder: Path, failing: int | None) -> None:
    (folder / str(rank)).write_text(str(os.getpid()))
    if rank == failing:
        raise KeyError("lost key")


def test_kept_ranks_run_several_jobs_until_one_fails(tmp_path: Path) -> None:
    ranks, pids = KeptRanks(), list[set[int]]()

    def run(failing: int | None) -> None:
        try:
            ranks.run(write_pid, 2, tmp_path, failing)
        finally:
            pids.append({int((tmp_path / str(rank)).read_text()) for rank in range(2)})

    run(None)
    run(None)
    with pytest.raises(RankError, match=r"rank 1 failed[\s\S]*in write_pid[\s\S]*KeyError: 'lost key'"):
        run(1)
    assert not ranks.pids
    run(None)
    assert pids[0] == pids[1] == pids[2] and not pids[0] & pids[3]
    assert ranks.pids == pids[3]
    ranks.end()
    assert not ranks.pids
