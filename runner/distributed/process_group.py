"""The life of a job's process group: formed once its ranks agree, left before the next job begins."""

import gc
import logging
from collections.abc import Callable
from contextlib import ExitStack

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from runner.distributed import local_exchange
from runner.distributed.backend import Backend
from runner.distributed.environment import RankInfo
from runner.distributed.left_waiting import start_waiting
from runner.distributed.local_exchange import LocalExchanges
from runner.distributed.local_sockets import Listener
from runner.distributed.neighbours import Neighbours
from runner.distributed.network import choose_interface, listening_on, meeting_at_once
from runner.distributed.peer_failure import PeerMissing
from runner.distributed.world_store import WorldStore

log = logging.getLogger(__name__)

DESTROY_S = 20.0


class ProcessGroup:
    """torch's default group of one job after another, in a process that joins its world once."""

    def __init__(self, rank_info: RankInfo, store: WorldStore, neighbours: Neighbours):
        self._rank_info, self._store, self._neighbours = rank_info, store, neighbours
        self._leaving: list[Callable[[bool], None]] = []

    def form(self, backend: Backend, device: torch.device) -> None:
        """Initialise the process group and the device. All ranks must call it; DDP needs it in a world of one too."""
        if device.type == "cuda":
            torch.cuda.set_device(device)
        self._listen(backend)
        listener = self._await_neighbours()
        store = self._store.topic("group")
        store.set_timeout(backend.timeout)  # which gloo leaves to it where it asks for all ranks at once
        dist.init_process_group(
            backend.process_group_backend(),
            store=store,
            rank=self._rank_info.rank,
            world_size=self._rank_info.world_size,
            timeout=backend.timeout,
            device_id=device if device.type == "cuda" else None,
        )
        num_ready = torch.tensor([0 if listener is None else int(listener.ready)])
        # gloo returns before its peers have connected: one that leaves early would fail the others in here.
        if self._rank_info.world_size > 1:
            dist.all_reduce(num_ready)
        self._neighbours.meet()
        if num_ready.item() == self._rank_info.world_size > 1:
            assert listener is not None
            self._join_neighbours(listener, backend)
        elif listener is not None:
            listener.close()

    def leave(self, went_well: bool) -> None:
        """Destroy the process group, where there is one.

        Whatever holds it (a DDP module) must be unreachable by now: a live one makes the process abort at its exit
        now and then (pytorch issue 190489).
        """
        while self._leaving:
            self._leaving.pop()(went_well)
        gc.collect()
        if dist.is_initialized():
            _destroy()

    def at_leave(self, act: Callable[[bool], None]) -> None:
        """Act before this job's group is left; told whether the job went well on this rank. It must not raise."""
        self._leaving.append(act)

    def _await_neighbours(self) -> Listener | None:
        """Before the others may look for it: what the ranks of this machine connect to."""
        own = self._neighbours.own
        if own is None:
            return None
        listener = Listener(own)
        self.at_leave(lambda went_well: listener.close())
        return listener

    def _join_neighbours(self, listener: Listener, backend: Backend) -> None:
        """Connect the ranks of each machine until the group is left, for what is small; or none, where one cannot."""
        reached = {rank: process for rank, process in self._neighbours.here.items() if listener.reaches(process)}
        sockets, why = None, None
        try:
            sockets = listener.join(reached, backend.timeout_s)
        except (PeerMissing, OSError) as error:  # which has gone will show
            why = error
        num_joined = torch.tensor([int(sockets is not None)])
        dist.all_reduce(num_joined)
        if num_joined.item() < self._rank_info.world_size:
            log.warning("the ranks of this machine exchange all by the process group: %s", why or "another rank cannot")
            if sockets is not None:
                sockets.close()
            return
        assert sockets is not None

        def drop(went_well: bool) -> None:
            local_exchange.use(None)
            sockets.close()

        self.at_leave(drop)
        local_exchange.use(LocalExchanges(self._rank_info.rank, sockets))

    def _listen(self, backend: Backend) -> None:
        """Choose the network interface, and how gloo meets, until the group is left: later groups are made so too."""
        interface, libraries = choose_interface(self._rank_info, backend.interface, self._store.topic("addresses"))
        chosen = ExitStack()
        chosen.enter_context(meeting_at_once())
        chosen.enter_context(listening_on(interface, libraries, override=backend.interface is not None))
        self.at_leave(lambda went_well: chosen.close())


def _destroy() -> None:
    """Destroy the group, or give it up: gloo has been seen to wait for good, when all of the job was done."""
    if torch.cuda.is_initialized():
        dist.destroy_process_group()  # nccl's belongs to the thread with this rank's device, and aborts by itself
        return
    destroying = start_waiting(dist.destroy_process_group, "destroy")
    destroying.join(DESTROY_S)
    if destroying.is_alive():
        log.warning("the process group could not be left within %g s, and is given up", DESTROY_S)


def make_mesh(device: torch.device, **axes: int) -> DeviceMesh:
    """The mesh with these named axes, slowest first. All ranks must call it, when the group is formed."""
    return init_device_mesh(device.type, tuple(axes.values()), mesh_dim_names=tuple(axes))
