"""The rendezvous of ranks that were started by hand, by a file or by an address."""

import multiprocessing
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from commands import free_port
from ranks import run_ranks

from runner.distributed.backend import Backend
from runner.distributed.environment import RankInfo, find_rank_info
from runner.distributed.machine import set_cores_and_threads
from runner.distributed.rendezvous import join
from runner.errors import InputError

TINY = ("model=toy", "data=toy", "max_steps=3", "parallel=ddp", "logger=none")


def start(folder: Path, rank: int, *overrides: str) -> subprocess.Popen[str]:
    outer = {key: value for key, value in os.environ.items() if not key.startswith("MASTER_")}
    env = {**outer, "RANK": str(rank), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "runner", *overrides]
    return subprocess.Popen(command, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def run_both(folder: Path, *overrides: str) -> list[tuple[int, str, str]]:
    ranks = [start(folder, rank, *overrides) for rank in (1, 0)]
    try:
        ended = [rank.communicate(timeout=300) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    return [(rank.returncode, out, err) for rank, (out, err) in zip(ranks, ended, strict=True)]


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["file", pytest.param("tcp", marks=pytest.mark.soak)])
def test_rendezvous_without_a_master(kind: str, tmp_path: Path) -> None:
    init = f"file://{tmp_path / 'meeting'}" if kind == "file" else f"tcp://127.0.0.1:{free_port()}"
    second, first = run_both(tmp_path, *TINY, f"backend.init={init}")
    assert (first[0], second[0]) == (0, 0), first[2] + second[2]
    assert "2 processes" in first[1] and second[1] == ""
    assert len(list((tmp_path / "outputs" / "run").iterdir())) == 1


def test_input_errors_are_reported_once(tmp_path: Path) -> None:
    second, first = run_both(tmp_path, *TINY, "model.hiden=3", f"backend.init=tcp://127.0.0.1:{free_port()}")
    assert (first[0], second[0]) == (2, 2)
    assert "model.hiden=3: no such key; did you mean model.hidden?" in first[2] and second[2] == ""


@pytest.mark.fault("a rank missing at the rendezvous", outcome="refused")
def test_missing_rank_is_named_at_the_rendezvous(tmp_path: Path) -> None:
    overrides = (*TINY, f"backend.init=tcp://127.0.0.1:{free_port()}", "launcher.join_timeout_s=2")
    alone = start(tmp_path, 0, *overrides)
    try:
        out, err = alone.communicate(timeout=300)
    finally:
        alone.kill()
    assert (alone.returncode, out) == (2, "")
    assert err.startswith("ranks [1] of 2 did not appear within launcher.join_timeout_s=2") and err.count("\n") == 1
    assert not (tmp_path / "outputs").exists()


@pytest.mark.parametrize(
    ("hosts", "local_ranks", "expected"),
    [
        ("aaaa", None, [(0, 4), (1, 4), (2, 4), (3, 4)]),
        ("aabb", None, [(0, 2), (1, 2), (0, 2), (1, 2)]),
        ("abab", "0011", [(0, 2), (0, 2), (1, 2), (1, 2)]),
        ("abbb", "0000", [(0, 1), (0, 3), (0, 3), (0, 3)]),  # users who give each rank one GPU do this
    ],
)
def test_ranks_are_counted_by_host(
    hosts: str, local_ranks: str | None, expected: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host's cores are divided among them, also without LOCAL_WORLD_SIZE."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("runner.distributed.machine.NUMA", Path("/nowhere"))
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(12)))
    environ = {"WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}

    def meet(rank: int, world_size: int) -> tuple[RankInfo, int]:
        socket.gethostname = lambda: hosts[rank]
        own = {"RANK": str(rank)} | ({"LOCAL_RANK": local_ranks[rank]} if local_ranks else {})
        world = join(find_rank_info(environ={**environ, **own}), Backend(name="gloo", device="cpu"), timeout_s=120)
        world.begin_job(world.backend)
        set_cores_and_threads(world, None)
        world.shutdown.close()
        return world.rank_info, torch.get_num_threads()

    met = run_ranks(meet, 4)
    assert [(rank_info.local_rank, rank_info.local_world_size) for rank_info, _ in met] == expected
    assert [threads for _, threads in met] == [12 // count for _, count in expected]
    assert {rank_info.on_one_machine for rank_info, _ in met} == {hosts == "aaaa"}


@pytest.mark.fault("an unresponsive process listens on MASTER_PORT", outcome="refused")
def test_unresponsive_listener_is_refused_in_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        rank_info = RankInfo(1, 1, 2, 2, source="test", master_addr="127.0.0.1", master_port=port)
        joining = multiprocessing.get_context("fork").Process(target=refused, args=(rank_info,))
        joining.start()
        joining.join(120)
        try:
            assert joining.exitcode == 0
        finally:
            joining.kill()
            joining.join()


def refused(rank_info: RankInfo) -> None:
    where = f"no world at 127.0.0.1:{rank_info.master_port} within 2 s .*does not respond.*MASTER_PORT"
    with pytest.raises(InputError, match=where):
        join(rank_info, Backend(), timeout_s=2)
    os._exit(0)
