"""Devices and threads of the ranks on a machine."""

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from runner.distributed.backend import Backend
from runner.distributed.environment import RankInfo
from runner.distributed.machine import choose_devices, set_threads
from runner.distributed.world import World


@pytest.fixture(autouse=True)
def threads_as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = torch.get_num_threads()
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("cores", "source", "expected"),
    [
        ([set(range(6))] * 2, "test", [3, 3]),  # in common
        ([{0, 1, 2}, {3, 4}], "test", [3, 2]),  # separate
        ([{0}] * 2, "test", [1, 1]),
        ([set(range(4))] * 2, "torchrun", [2, 2]),  # which sets OMP_NUM_THREADS=1
    ],
)
def test_cores_are_divided_among_ranks(
    cores: list[set[int]], source: str, expected: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if source == "torchrun":
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", "error.json")

    def take(rank: int, world_size: int) -> int:
        os.sched_getaffinity = lambda pid: cores[rank]  # type: ignore[assignment]
        rank_info = RankInfo(rank, rank, world_size, world_size, source=source)
        store = dist.FileStore(str(tmp_path / "store"), world_size)
        world = World(rank_info, store, Backend(name="gloo", device="cpu"))
        world.begin_job(world.backend)
        set_threads(world, None)
        return torch.get_num_threads()

    assert run_ranks(take, 2) == expected


def test_threads_set_by_the_user_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(RankInfo(), None, Backend(name="gloo", device="cpu"))
    set_threads(world, 2)
    assert torch.get_num_threads() == 2
    torch.set_num_threads(1)
    by_agent = World(RankInfo(source="torchrun"), None, Backend(name="gloo", device="cpu"))
    for each, value in ((world, "5"), (by_agent, "1")):  # launcher=torchrun does not set the variable
        monkeypatch.setenv("OMP_NUM_THREADS", value)
        set_threads(each, None)
        assert torch.get_num_threads() == 1, "torch itself reads OMP_NUM_THREADS when it is imported"


def devices_of_ranks(
    path: Path,
    monkeypatch: pytest.MonkeyPatch,
    visible: list[list[int]],
    local_ranks: list[int],
    each: int = 1,
    backend: str = "auto",
) -> list[tuple[list[str], list[str]]]:
    """Return messages and devices of each rank if rank r sees GPUs visible[r] of the machine."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)

    def choose(rank: int, world_size: int) -> tuple[list[str], list[str]]:
        torch.cuda.device_count = lambda: len(visible[rank])
        torch.cuda.get_device_properties = lambda number: SimpleNamespace(  # type: ignore[assignment]
            uuid=f"uuid-{visible[rank][number]}"
        )
        rank_info = RankInfo(rank, local_ranks[rank], world_size, world_size, source="test")
        store = dist.FileStore(str(path / "store"), world_size)
        world = World(rank_info, store, Backend(backend, "cuda", devices_per_rank=each))
        world.begin_job(world.backend)
        messages = choose_devices(world)
        return messages, [str(device) for device in world.devices]

    return run_ranks(choose, len(visible))


@pytest.mark.parametrize(
    ("visible", "local_ranks", "each", "expected"),
    [
        ([[4], [5], [7]], [0, 1, 2], 1, [["cuda:0"]] * 3),  # srun --gpus-per-task=1
        ([[4], [5]], [0, 0], 1, [["cuda:0"]] * 2),  # by hand, CUDA_VISIBLE_DEVICES and LOCAL_RANK=0 for each
        ([[2, 4], [1, 3]], [0, 1], 2, [["cuda:0", "cuda:1"]] * 2),
        ([[2, 3], [2, 3]], [0, 1], 1, [["cuda:0"], ["cuda:1"]]),
    ],
)
def test_rank_uses_a_gpu_that_only_it_can_see(
    visible: list[list[int]],
    local_ranks: list[int],
    each: int,
    expected: list[list[str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chosen = devices_of_ranks(tmp_path, monkeypatch, visible, local_ranks, each)
    assert chosen == [([], devices) for devices in expected]


def test_one_gpu_for_two_ranks_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    message = "2 ranks on this machine need a GPU each, but there are 1; start fewer, or try backend=gloo"
    message += ", which computes on the CPU"
    chosen = devices_of_ranks(tmp_path, monkeypatch, [[3], [3]], [0, 0])
    assert [messages for messages, _ in chosen] == [[message]] * 2


def test_ranks_of_gloo_share_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = devices_of_ranks(tmp_path, monkeypatch, [[3, 4]] * 3, [0, 1, 2], backend="gloo")
    assert chosen == [([], ["cuda:0"]), ([], ["cuda:1"]), ([], ["cuda:0"])]
