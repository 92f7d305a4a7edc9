"""The guarantees of `run_ranks` that other tests rely on."""

import multiprocessing
import os
import time
from pathlib import Path

import pytest
from ranks import RankError, run_ranks


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
    assert not multiprocessing.active_children()


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
