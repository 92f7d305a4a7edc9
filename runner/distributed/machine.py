"""A rank's part of its machine: devices, CPU cores and threads, and the memory that is available."""

import itertools
import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from runner.distributed.environment import RankInfo
from runner.distributed.world import World

NUMA = Path("/sys/devices/system/node")
PCI = Path("/sys/bus/pci/devices")
MEMINFO, CGROUPS_OF_PROCESS, CGROUPS = Path("/proc/meminfo"), Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


def choose_devices(world: World) -> list[str]:
    """Set `world.devices` to this rank's devices. Return messages about what is wrong. All ranks must call it."""
    messages = world.backend.check()
    on_gpu = not messages and world.backend.device_type() == "cuda"
    num_devices, num_ranks = world.backend.devices_per_rank, world.rank_info.local_world_size
    # Slurm may let each of its tasks see only its own GPUs, as --gpus-per-task=1 does.
    visible = range(num_devices) if on_gpu and num_ranks > 1 and torch.cuda.device_count() == num_devices else ()
    uuids = {str(torch.cuda.get_device_properties(number).uuid) for number in visible}
    others = world.consensus.gather_from_machine("gpus", json.dumps(sorted(uuids)))
    if messages:
        return messages
    if not on_gpu:
        world.devices = [torch.device("cpu")] * num_devices
        return []
    is_bound = bool(uuids) and uuids.isdisjoint(itertools.chain.from_iterable(map(json.loads, others)))
    first = 0 if is_bound else world.rank_info.local_rank * num_devices
    if (uuids and not is_bound) or first + num_devices > torch.cuda.device_count():
        need = "a GPU each" if num_devices == 1 else f"{num_devices} GPUs each, {num_ranks * num_devices} together"
        return [
            f"{num_ranks} ranks on this machine need {need}, but there are {torch.cuda.device_count()}; "
            "start fewer, or try backend=gloo"
        ]
    world.devices = [torch.device("cuda", first + number) for number in range(num_devices)]
    return []


def set_cores_and_threads(world: World, threads: int | None) -> None:
    """Bind this rank to the cores of its NUMA node, and set its number of threads. All ranks must call it.

    Call it after `choose_devices`. threads: None for an equal number of cores on each rank of the machine, unless
    OMP_NUM_THREADS is set by the user.
    """
    cores = allowed_cores()
    nodes = {number: allowed for number, node in numa_nodes().items() if (allowed := node & cores)}
    if len(nodes) > 1:
        cores = cores_of_rank(nodes, world.rank_info, _node_of_gpu(world))
        os.sched_setaffinity(0, cores)
    if threads is None and not _user_set_threads(world.rank_info):
        others = world.consensus.gather_from_machine("cores", ",".join(map(str, sorted(cores))))
        # A launcher may have bound each rank to cores of its own.
        num_sharing = 1 + sum(bool(cores & {int(core) for core in text.split(",")}) for text in others)
        threads = max(len(cores) // num_sharing, 1)
    if threads is not None:
        torch.set_num_threads(threads)


def allowed_cores() -> set[int]:
    """Return the cores on which this process may run."""
    if hasattr(os, "sched_getaffinity"):
        return set(os.sched_getaffinity(0))
    return set(range(os.cpu_count() or 1))


def numa_nodes(root: Path = NUMA) -> dict[int, set[int]]:
    """Return the cores of each NUMA node of this machine by its number; {} if the system does not list them."""
    lists = {int(path.parent.name.removeprefix("node")): path for path in root.glob("node[0-9]*/cpulist")}
    return {number: _parse_cores(path.read_text().strip()) for number, path in sorted(lists.items())}


def cores_of_rank(nodes: Mapping[int, set[int]], rank_info: RankInfo, gpu_node: int | None = None) -> set[int]:
    """Return the cores of the NUMA node of the rank's GPU, or of the rank's fraction of the nodes, at least one."""
    if gpu_node is not None and gpu_node in nodes:
        return nodes[gpu_node]
    first = rank_info.local_rank * len(nodes) // rank_info.local_world_size
    last = max((rank_info.local_rank + 1) * len(nodes) // rank_info.local_world_size, first + 1)
    return set().union(*list(nodes.values())[first:last])


def available_memory() -> float:
    """Return the bytes that this process may still use; infinity if the system does not report them.

    The limits of the process's control group and of those around it count (cgroups(7), versions 1 and 2).
    """
    return min([*_memory_of_machine(), *_memory_of_cgroups()], default=math.inf)


def _user_set_threads(rank_info: RankInfo) -> bool:
    """Return True if the user has set OMP_NUM_THREADS. torchrun sets it to 1 for its ranks if it is not set."""
    if "OMP_NUM_THREADS" not in os.environ:
        return False
    if rank_info.source not in ("torchrun", "torch.distributed.launch") or os.environ["OMP_NUM_THREADS"] != "1":
        return True
    try:
        agent = Path(f"/proc/{os.getppid()}/environ").read_bytes()
    except OSError:
        return True
    return any(variable.startswith(b"OMP_NUM_THREADS=") for variable in agent.split(b"\0"))


def _node_of_gpu(world: World) -> int | None:
    if world.device.type != "cuda":
        return None
    gpu: Any = torch.cuda.get_device_properties(world.device)  # its type lacks these three
    path = PCI / f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0" / "numa_node"
    number = int(path.read_text()) if path.exists() else -1
    return number if number >= 0 else None  # -1 if the machine has only one node


def _parse_cores(text: str) -> set[int]:
    """0-3,8 is 0, 1, 2, 3 and 8."""
    spans = [part.split("-") for part in text.split(",") if part]
    return {core for span in spans for core in range(int(span[0]), int(span[-1]) + 1)}


def _memory_of_machine() -> Iterator[int]:
    with suppress(OSError):
        for line in MEMINFO.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                yield int(line.split()[1]) * 1024


def _memory_of_cgroups() -> Iterator[int]:
    with suppress(OSError):
        for line in CGROUPS_OF_PROCESS.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers == "":
                root, names = CGROUPS, ("memory.max", "memory.current")
            elif "memory" in controllers.split(","):
                root, names = CGROUPS / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
            else:
                continue
            own = Path(path.lstrip("/"))
            for group in (own, *own.parents):  # in a container the path may be the host's, and may not exist
                with suppress(OSError, ValueError):  # "max" is no limit
                    limit, used = (int((root / group / name).read_text()) for name in names)
                    yield max(0, limit - used)
