"""Which cores of its machine a rank runs on, and with how many threads."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from runner.distributed.environment import RankInfo
from runner.distributed.world import World

NUMA = Path("/sys/devices/system/node")
PCI = Path("/sys/bus/pci/devices")


def take_cores(world: World, threads: int | None) -> None:
    """Keep this rank to the cores of its NUMA node, and share the cores out as threads. All ranks must call it.

    The device is chosen by then. threads: as many, instead; so does OMP_NUM_THREADS, unless it is torchrun's own 1.
    """
    cores = allowed_cores()
    nodes = {number: own for number, node in numa_nodes().items() if (own := node & cores)}
    if len(nodes) > 1:
        cores = share_of_nodes(nodes, world.rank_info, _node_of_gpu(world))
        os.sched_setaffinity(0, cores)
    if threads is None and not _user_set_threads(world.rank_info):
        others = world.agreement.others_here("cores", ",".join(map(str, sorted(cores))))
        # A launcher may have given each rank its own already.
        num_sharing = 1 + sum(bool(cores & {int(word) for word in text.split(",")}) for text in others)
        threads = max(len(cores) // num_sharing, 1)
    if threads is not None:
        torch.set_num_threads(threads)


def numa_nodes(root: Path = NUMA) -> dict[int, set[int]]:
    """The cores of each NUMA node of this machine, by its number; empty where the system does not say."""
    lists = {int(path.parent.name.removeprefix("node")): path for path in root.glob("node[0-9]*/cpulist")}
    return {number: _cores_of(path.read_text().strip()) for number, path in sorted(lists.items())}


def share_of_nodes(nodes: Mapping[int, set[int]], rank_info: RankInfo, gpu_node: int | None = None) -> set[int]:
    """The cores of the node that the rank's GPU hangs on, or of the rank's share of the nodes, at least one."""
    if gpu_node is not None and gpu_node in nodes:
        return nodes[gpu_node]
    first = rank_info.local_rank * len(nodes) // rank_info.local_world_size
    last = max((rank_info.local_rank + 1) * len(nodes) // rank_info.local_world_size, first + 1)
    return set().union(*list(nodes.values())[first:last])


def _user_set_threads(rank_info: RankInfo) -> bool:
    """torchrun sets OMP_NUM_THREADS=1 where it is not set; its own environment, from before, tells which it was."""
    if "OMP_NUM_THREADS" not in os.environ:
        return False
    if rank_info.found not in ("torchrun", "torch.distributed.launch") or os.environ["OMP_NUM_THREADS"] != "1":
        return True
    try:
        agent = Path(f"/proc/{os.getppid()}/environ").read_bytes()
    except OSError:
        return True
    return any(word.startswith(b"OMP_NUM_THREADS=") for word in agent.split(b"\0"))


def _node_of_gpu(world: World) -> int | None:
    if world.device.type != "cuda":
        return None
    gpu: Any = torch.cuda.get_device_properties(world.device)  # its type lacks these three
    path = PCI / f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0" / "numa_node"
    number = int(path.read_text()) if path.exists() else -1
    return number if number >= 0 else None  # -1 where the machine has only one


def allowed_cores() -> set[int]:
    """The cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return set(os.sched_getaffinity(0))
    return set(range(os.cpu_count() or 1))


def _cores_of(text: str) -> set[int]:
    """0-3,8 is 0, 1, 2, 3 and 8."""
    spans = [part.split("-") for part in text.split(",") if part]
    return {core for span in spans for core in range(int(span[0]), int(span[-1]) + 1)}
