"""A rank's part of its machine: devices and threads, and the memory that is available."""

import errno
import itertools
import json
import math
import multiprocessing
import os
import resource
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import torch

from runner.distributed.environment import RankInfo
from runner.distributed.world import World
from runner.errors import InputError
from runner.process.cores import allowed_cores

MEMINFO, CGROUPS_OF_PROCESS, CGROUPS = Path("/proc/meminfo"), Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
LARGER = "as with docker run --shm-size=1g"  # the end of messages about /dev/shm
MIN_SEMAPHORES = 32  # more than one rank or loader worker needs


def check_shared_memory(option: str) -> None:
    """Raise InputError if semaphores cannot be created in /dev/shm, where each is a file. `option` needs them."""
    try:
        _ = [multiprocessing.get_context("fork").Lock() for _ in range(MIN_SEMAPHORES)]
    except OSError as error:
        reason = f"needs shared memory, but /dev/shm cannot be written ({error.strerror})"
        raise InputError(f"{option} {reason}; mount it writable and larger, {LARGER}") from None


def check_open_files(option: str, count: int) -> None:
    """Raise InputError if this process cannot open `count` further files and sockets. `option` needs them.

    Otherwise, libraries report the limit by a traceback in each of several processes and threads, or not at all: a
    process that cannot accept a connection lets the other one wait.
    """
    if not can_open(count):
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        raise InputError(
            f"{option} needs {count} more open files, and the limit is {limit} in all; raise it, as with ulimit -n 1024"
        )


def can_open(count: int) -> bool:
    """Return True if the limit of open files allows this process `count` more. Other threads may open files meanwhile.

    Opening them to find out could use the last ones, which another thread needs.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        used = sum(int(name) < limit for name in os.listdir("/dev/fd")) - 1  # without the list itself
    except OSError as error:
        return error.errno != errno.EMFILE
    return limit == resource.RLIM_INFINITY or used + count <= limit


def choose_devices(world: World) -> list[str]:
    """Set `world.devices` to this rank's devices. Return a message for each problem. All ranks must call it."""
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
    if world.backend.name == "gloo" and num_devices == 1:  # NCCL does not accept two ranks on one GPU
        first %= torch.cuda.device_count()
    elif (uuids and not is_bound) or first + num_devices > torch.cuda.device_count():
        need = "a GPU each" if num_devices == 1 else f"{num_devices} GPUs each, {num_ranks * num_devices} together"
        return [
            f"{num_ranks} ranks on this machine need {need}, but there are {torch.cuda.device_count()}; "
            "start fewer, or try backend=gloo, which computes on the CPU"
        ]
    world.devices = [torch.device("cuda", first + number) for number in range(num_devices)]
    return []


def set_threads(world: World, threads: int | None) -> None:
    """Set this rank's number of threads. All ranks must call it.

    threads: if None, the ranks of a machine divide its cores equally, unless the user has set OMP_NUM_THREADS.
    """
    if threads is None and not _user_set_threads(world.rank_info):
        cores = allowed_cores()
        others = world.consensus.gather_from_machine("cores", ",".join(map(str, sorted(cores))))
        # A launcher may have bound the ranks to different cores.
        num_sharing = 1 + sum(bool(cores & {int(core) for core in text.split(",")}) for text in others)
        threads = max(len(cores) // num_sharing, 1)
    if threads is not None:
        torch.set_num_threads(threads)


def available_memory() -> float:
    """Return the bytes that this process may still use, on the machine and in its cgroups; infinity if unknown."""
    return min([*_memory_of_machine(), *_memory_of_cgroups()], default=math.inf)


def _user_set_threads(rank_info: RankInfo) -> bool:
    """Return True if the user has set OMP_NUM_THREADS. The command torchrun sets it to 1 if it is not set."""
    value = os.environ.get("OMP_NUM_THREADS")
    by_command = rank_info.source == "torchrun" and bool(os.environ.get("TORCHELASTIC_ERROR_FILE"))
    return value is not None and not (by_command and value == "1")


def _memory_of_machine() -> Iterator[int]:
    with suppress(OSError):
        for line in MEMINFO.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                yield int(line.split()[1]) * 1024


def _memory_of_cgroups() -> Iterator[int]:
    with suppress(OSError):
        for line in CGROUPS_OF_PROCESS.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers:
                continue  # of version 1
            own = Path(path.lstrip("/"))
            for group in (own, *own.parents):  # in a container the path may be the host's, and may not exist
                with suppress(OSError, ValueError):  # "max" is no limit
                    limit, used = (int((CGROUPS / group / f"memory.{name}").read_text()) for name in ("max", "current"))
                    yield max(0, limit - used)
