"""The life of a job's process group: formed once its ranks agree, left before the next job begins."""

import gc
from collections.abc import Callable
from contextlib import ExitStack

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from runner.distributed.backend import Backend
from runner.distributed.environment import RankInfo
from runner.distributed.network import choose_interface, listening_on
from runner.distributed.world_store import WorldStore


class ProcessGroup:
    """torch's default group of one job after another, in a process that joins its world once."""

    def __init__(self, rank_info: RankInfo, store: WorldStore):
        self._rank_info, self._store = rank_info, store
        self._leaving: list[Callable[[bool], None]] = []

    def form(self, backend: Backend, device: torch.device) -> None:
        """Initialise the process group and the device. All ranks must call it; DDP needs it in a world of one too."""
        if device.type == "cuda":
            torch.cuda.set_device(device)
        self._listen(backend)
        dist.init_process_group(
            backend.process_group_backend(),
            store=self._store.topic("group"),
            rank=self._rank_info.rank,
            world_size=self._rank_info.world_size,
            timeout=backend.timeout,
            device_id=device if device.type == "cuda" else None,
        )
        # gloo returns before its peers have connected: one that leaves early would fail the others in here.
        if self._rank_info.world_size > 1:
            dist.all_reduce(torch.zeros(1))

    def leave(self, went_well: bool) -> None:
        """Destroy the process group, where there is one.

        Whatever holds it (a DDP module) must be unreachable by now: a live one makes the process abort at its exit
        now and then (pytorch issue 190489).
        """
        while self._leaving:
            self._leaving.pop()(went_well)
        gc.collect()
        if dist.is_initialized():
            dist.destroy_process_group()

    def at_leave(self, act: Callable[[bool], None]) -> None:
        """Act before this job's group is left; told whether the job went well on this rank. It must not raise."""
        self._leaving.append(act)

    def _listen(self, backend: Backend) -> None:
        """Choose the network interface until the group is left: later groups are made on it too."""
        interface, libraries = choose_interface(self._rank_info, backend.interface, self._store.topic("addresses"))
        chosen = ExitStack()
        chosen.enter_context(listening_on(interface, libraries, override=backend.interface is not None))
        self.at_leave(lambda went_well: chosen.close())


def make_mesh(device: torch.device, **axes: int) -> DeviceMesh:
    """The mesh with these named axes, slowest first. All ranks must call it, when the group is formed."""
    return init_device_mesh(device.type, tuple(axes.values()), mesh_dim_names=tuple(axes))
