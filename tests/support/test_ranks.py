"""The guarantees of `run_ranks` that other tests rely on."""

import multiprocessing
import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import RankError, run_ranks


def test_results_are_returned_by_rank() -> None:
    offset = torch.tensor(10.0)  # a variable of the closure

    def add(rank: int, world_size: int, factor: float) -> tuple[torch.Tensor, int, int]:
        total = factor * (rank + offset)
        dist.all_reduce(total)
        return total, rank, torch.get_num_threads()

    results = run_ranks(add, 3, 2.0)
    assert results == [(torch.tensor(66.0), rank, 1) for rank in range(3)]


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


def test_a_rank_that_dies_silently_is_named() -> None:
    def die(rank: int, world_size: int) -> None:
        if rank == 0:
            os._exit(7)
        dist.barrier()

    with pytest.raises(RankError, match="rank 0 failed with status 7"):
        run_ranks(die, 2)


def test_ranks_listen_on_loopback_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "a machine's own choice")

    def listen(rank: int, world_size: int) -> list[str]:
        mine = {os.stat(entry.path).st_ino for entry in os.scandir("/proc/self/fd") if os.path.exists(entry.path)}
        tables = Path("/proc/net/tcp").read_text() + Path("/proc/net/tcp6").read_text()
        # sl, local address (hexadecimal, bytes reversed), remote address, state (0A listens), ..., inode at 9
        rows = [line.split() for line in tables.splitlines() if ":" in line.split()[0]]
        return [row[1] for row in rows if row[3] == "0A" and int(row[9]) in mine]

    addresses = [address for rank in run_ranks(listen, 2) for address in rank]
    assert len(addresses) == 2 and all(address.startswith("0100007F:") for address in addresses)
