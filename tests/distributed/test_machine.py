"""Devices, cores and threads of the ranks on a machine."""

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
from runner.distributed.machine import choose_devices, cores_of_rank, numa_nodes, set_cores_and_threads
from runner.distributed.world import World

NODES = {1: set(range(0, 4)), 2: set(range(4, 8))}


@pytest.fixture(autouse=True)
def threads_as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = torch.get_num_threads()
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("runner.distributed.machine.NUMA", Path("/nowhere"))
    yield
    torch.set_num_threads(before)


def threads_of_ranks(path: Path, world_size: int, cores: list[set[int]], source: str = "test") -> list[int]:
    """Return the number of threads of each rank if rank r may run on cores[r]."""

    def take(rank: int, world_size: int) -> int:
        os.sched_getaffinity = lambda pid: cores[rank]  # type: ignore[assignment]
        rank_info = RankInfo(rank, rank, world_size, world_size, source=source)
        store = dist.FileStore(str(path / "store"), world_size)
        world = World(rank_info, store, Backend(name="gloo", device="cpu"))
        world.begin_job(world.backend)
        set_cores_and_threads(world, None)
        return torch.get_num_threads()

    return run_ranks(take, world_size)


def test_common_cores_are_divided_among_ranks(tmp_path: Path) -> None:
    assert threads_of_ranks(tmp_path, 2, [set(range(6))] * 2) == [3, 3]


def test_ranks_with_separate_cores_use_all_of_them(tmp_path: Path) -> None:
    assert threads_of_ranks(tmp_path, 2, [{0, 1, 2}, {3, 4}]) == [3, 2]


def test_each_rank_has_at_least_one_thread(tmp_path: Path) -> None:
    assert threads_of_ranks(tmp_path, 3, [{0, 1}] * 3) == [1, 1, 1]


def test_single_thread_set_by_torchrun_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    # The parent of the ranks is this process, in whose initial environment the variable may have been set.
    started_with_it = b"OMP_NUM_THREADS=" in Path("/proc/self/environ").read_bytes()
    expected = [1, 1] if started_with_it else [2, 2]
    assert threads_of_ranks(tmp_path, 2, [{0, 1, 2, 3}] * 2, source="torchrun") == expected


def test_threads_set_by_the_user_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(RankInfo(), None, Backend(name="gloo", device="cpu"))
    set_cores_and_threads(world, 2)
    assert torch.get_num_threads() == 2
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    torch.set_num_threads(1)
    set_cores_and_threads(world, None)
    assert torch.get_num_threads() == 1, "torch itself has heard OMP_NUM_THREADS as it was imported"


@pytest.mark.parametrize(
    ("local_rank", "local_world_size", "expected"),
    [
        (0, 1, NODES[1] | NODES[2]),
        (0, 2, NODES[1]),
        (1, 2, NODES[2]),
        (1, 3, NODES[1]),
        (2, 3, NODES[2]),
        (3, 8, NODES[1]),
        (4, 8, NODES[2]),
    ],
)
def test_ranks_are_distributed_over_numa_nodes(local_rank: int, local_world_size: int, expected: set[int]) -> None:
    assert cores_of_rank(NODES, RankInfo(local_rank, local_rank, local_world_size, local_world_size)) == expected


def test_numa_node_of_the_gpu_takes_precedence() -> None:
    assert cores_of_rank(NODES, RankInfo(0, 0, 2, 2), gpu_node=2) == NODES[2]


def test_rank_is_bound_to_allowed_cores_of_its_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, cores in enumerate(("0-3,8", "4-7")):
        (tmp_path / f"node{number}").mkdir()
        (tmp_path / f"node{number}" / "cpulist").write_text(cores + "\n")
    assert numa_nodes(tmp_path) == {0: {0, 1, 2, 3, 8}, 1: {4, 5, 6, 7}}
    monkeypatch.setattr("runner.distributed.machine.numa_nodes", lambda: numa_nodes(tmp_path))
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {2, 3, 4})
    bound: list[set[int]] = []
    monkeypatch.setattr("os.sched_setaffinity", lambda pid, cores: bound.append(cores))
    world = World(RankInfo(1, 1, 2, 2), dist.HashStore(), Backend(name="gloo", device="cpu"))
    set_cores_and_threads(world, 1)
    assert bound == [{4}]


def devices_of_ranks(
    path: Path, monkeypatch: pytest.MonkeyPatch, visible: list[list[int]], local_ranks: list[int], each: int = 1
) -> list[tuple[list[str], list[str], list[set[int]]]]:
    """Return messages, devices and cores of each rank if rank r sees GPUs visible[r] of the machine.

    GPUs with odd numbers belong to the second NUMA node.
    """
    for gpu in range(8):
        (path / f"0000:{gpu:02x}:00.0").mkdir()
        (path / f"0000:{gpu:02x}:00.0" / "numa_node").write_text(f"{1 + gpu % 2}\n")
    monkeypatch.setattr("runner.distributed.machine.PCI", path)
    monkeypatch.setattr("runner.distributed.machine.numa_nodes", lambda: NODES)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: NODES[1] | NODES[2])
    bound: list[set[int]] = []
    monkeypatch.setattr("os.sched_setaffinity", lambda pid, cores: bound.append(cores))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)

    def choose(rank: int, world_size: int) -> tuple[list[str], list[str], list[set[int]]]:
        def properties(device: int | torch.device) -> SimpleNamespace:
            gpu = visible[rank][device if isinstance(device, int) else device.index]
            return SimpleNamespace(uuid=f"uuid-{gpu}", pci_domain_id=0, pci_bus_id=gpu, pci_device_id=0)

        torch.cuda.device_count = lambda: len(visible[rank])
        torch.cuda.get_device_properties = properties  # type: ignore[assignment]
        rank_info = RankInfo(rank, local_ranks[rank], world_size, world_size, source="test")
        store = dist.FileStore(str(path / "store"), world_size)
        world = World(rank_info, store, Backend(device="cuda", devices_per_rank=each))
        world.begin_job(world.backend)
        messages = choose_devices(world)
        set_cores_and_threads(world, None)
        return messages, [str(device) for device in world.devices], bound

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
    assert [messages for messages, _, _ in chosen] == [[]] * len(visible)
    assert [devices for _, devices, _ in chosen] == expected
    gpus = [own[int(devices[0].removeprefix("cuda:"))] for own, devices in zip(visible, expected, strict=True)]
    assert [cores for _, _, cores in chosen] == [[NODES[1 + gpu % 2]] for gpu in gpus]


@pytest.mark.parametrize("local_ranks", [[0, 1], [0, 0]])
def test_one_gpu_for_two_ranks_is_refused(
    local_ranks: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    message = "2 ranks on this machine need a GPU each, but there are 1; start fewer, or try backend=gloo"
    chosen = devices_of_ranks(tmp_path, monkeypatch, [[3], [3]], local_ranks)
    assert [messages for messages, _, _ in chosen] == [[message]] * 2
