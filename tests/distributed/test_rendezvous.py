"""The rendezvous of ranks that were started by hand, by a file or by an address."""

import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
from contextlib import redirect_stderr
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
import torch
from commands import free_port, wait_until
from ranks import run_ranks

from runner.distributed.backend import Backend
from runner.distributed.environment import RankInfo, find_rank_info
from runner.distributed.failures.signals import handling_signals
from runner.distributed.machine import set_threads
from runner.distributed.rendezvous import join
from runner.errors import InputError, Preempted


@pytest.mark.thorough
def test_rendezvous_by_a_file(tmp_path: Path) -> None:
    outer = {key: value for key, value in os.environ.items() if not key.startswith("MASTER_")}
    command = [sys.executable, "-m", "runner", "model=toy", "data=toy", "max_steps=3", "parallel=ddp", "logger=none"]
    command.append(f"backend.init=file://{tmp_path / 'meeting'}")
    ranks = []
    try:
        for rank in range(2):
            env = {**outer, "RANK": str(rank), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
            ranks.append(subprocess.Popen(command, cwd=tmp_path, env=env, stdout=subprocess.PIPE, text=True))
        first, second = [rank.communicate(timeout=300)[0] for rank in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert [rank.returncode for rank in ranks] == [0, 0]
    assert "2 processes" in first and second == ""
    assert len(list((tmp_path / "outputs" / "run").iterdir())) == 1


@pytest.mark.fault("a rank missing at the rendezvous", outcome="refused")
def test_missing_rank_is_named_at_the_rendezvous(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runner.distributed.rendezvous.SILENT_S", 0.5)
    init = f"tcp://127.0.0.1:{free_port()}"

    def meet(rank: int, world_size: int) -> None:
        rank_info = find_rank_info(init, {"RANK": str(rank), "WORLD_SIZE": "3"})
        printed = StringIO()
        with redirect_stderr(printed), pytest.raises(InputError) as caught:
            join(rank_info, Backend(init=init), timeout_s=2)
        noticed = re.fullmatch(r"waiting for ranks? (1, )?2 of 3, at most 2 s\n", printed.getvalue())
        assert bool(noticed) == (rank == 0), printed.getvalue()
        missing = "ranks [2] of 3 did not appear within launcher.join_timeout_s=2; check that every one was started"
        assert str(caught.value).startswith(missing if rank == 0 else "") and (rank == 0) == bool(caught.value.messages)
        if rank == 1:
            (tmp_path / "refused").touch()
        wait_until((tmp_path / "refused").exists)  # rank 0 serves the store

    run_ranks(meet, 2, forms_group=False)


def test_a_rank_does_not_join_another_run_at_the_same_port(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 of the run b reaches the store of the run a, whose own rank 1 comes later."""
    monkeypatch.setattr("runner.distributed.rendezvous.REPORT_TIMEOUT_S", 0.0)
    environ = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    stranger_left = multiprocessing.get_context("fork").Event()

    def meet(process: int, world_size: int) -> None:
        rank, run = [("0", "a"), ("1", "b"), ("1", "a")][process]
        rank_info = find_rank_info(environ={**environ, "RANK": rank, "TORCHELASTIC_RUN_ID": run})
        rank_info = replace(rank_info, has_parent=False)
        if run == "b":
            with pytest.raises(InputError, match="rank 0 of 2 did not appear within"):
                join(rank_info, Backend(name="gloo", device="cpu"), timeout_s=0.5)
            stranger_left.set()
            return
        if rank == "1":
            assert stranger_left.wait(100)
        world = join(rank_info, Backend(name="gloo", device="cpu"), timeout_s=120)
        world.consensus.first_error("met", [])  # rank 0 must not exit before
        world.shutdown.close()

    run_ranks(meet, 3, forms_group=False)


@pytest.mark.parametrize(
    ("hosts", "local_ranks", "expected"),
    [
        ("aaaa", None, [(0, 4), (1, 4), (2, 4), (3, 4)]),
        ("abab", "0011", [(0, 2), (0, 2), (1, 2), (1, 2)]),
        ("abbb", "0000", [(0, 1), (0, 3), (0, 3), (0, 3)]),  # users who give each rank one GPU do this
    ],
)
def test_ranks_are_counted_by_host(
    hosts: str, local_ranks: str | None, expected: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host's cores are divided among them, also without LOCAL_WORLD_SIZE."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(12)))
    environ = {"WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}

    def meet(rank: int, world_size: int) -> tuple[RankInfo, int]:
        socket.gethostname = lambda: hosts[rank]
        own = {"RANK": str(rank)} | ({"LOCAL_RANK": local_ranks[rank]} if local_ranks else {})
        world = join(find_rank_info(environ={**environ, **own}), Backend(name="gloo", device="cpu"), timeout_s=120)
        world.begin_job(world.backend)
        set_threads(world, None)
        world.shutdown.close()
        return world.rank_info, torch.get_num_threads()

    met = run_ranks(meet, 4)
    assert [(rank_info.local_rank, rank_info.local_world_size) for rank_info, _ in met] == expected
    assert [threads for _, threads in met] == [12 // count for _, count in expected]
    assert {rank_info.on_one_machine for rank_info, _ in met} == {hosts == "aaaa"}


@pytest.mark.fault("an unresponsive process listens on MASTER_PORT", outcome="refused")
@pytest.mark.parametrize("is_stopped", [False, True])
def test_unresponsive_listener_is_refused_in_time_and_a_signal_ends_the_wait(
    is_stopped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runner.distributed.rendezvous.TRY_S", 0.05)
    monkeypatch.setattr("runner.distributed.world_store.STOP_GRACE_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]

        def refused(rank: int, world_size: int) -> None:
            rank_info = RankInfo(1, 1, 2, 2, source="test", master_addr="127.0.0.1", master_port=port)
            where = f"could not reach the store at 127.0.0.1:{port} within 2 s .*does not respond.*MASTER_PORT"
            with handling_signals():
                if is_stopped:
                    os.kill(os.getpid(), signal.SIGTERM)
                with pytest.raises(Preempted if is_stopped else InputError, match="SIGTERM" if is_stopped else where):
                    join(rank_info, Backend(), timeout_s=100 if is_stopped else 2)
            os._exit(0)

        process = multiprocessing.get_context("fork").Process(target=refused, args=(1, 2))
        process.start()
        process.join(60)
        try:
            assert process.exitcode == 0
        finally:
            process.kill()
            process.join()
