"""The process group of a job: formed once its ranks agree on the input, destroyed before the next job."""

import gc
import logging
from collections.abc import Callable
from concurrent import futures
from contextlib import ExitStack, closing
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils._python_dispatch import _disable_current_modes

from runner.distributed.backend import Backend
from runner.distributed.environment import IMAGINED, RankInfo
from runner.distributed.failures.flight_recorder import BUFFER
from runner.distributed.failures.peer_failure import PeerMissing
from runner.distributed.local import exchange
from runner.distributed.local.local_ranks import LocalRanks
from runner.distributed.local.sockets import Listener
from runner.distributed.network import choose_interface, environment_variables
from runner.distributed.world_store import WorldStore
from runner.process.daemon_thread import call_in_daemon

log = logging.getLogger(__name__)

DESTROY_S = 20.0
NCCL_EXTRA_S = 60.0  # from the timeout until NCCL terminates the process, if the watchdog has not done so
POLL_S, LOST_S = 0.1, 2.0  # between checks for lost ranks, and for a group to form nevertheless


class ProcessGroup:
    """torch's default process group, which each job of this process forms and destroys."""

    def __init__(self, rank_info: RankInfo, store: WorldStore, local_ranks: LocalRanks):
        self._rank_info, self._store, self._local_ranks = rank_info, store, local_ranks
        self._callbacks: list[Callable[[bool], None]] = []

    def form(self, backend: Backend, device: torch.device) -> None:
        """Initialize the process group and the device. All ranks must call it. DDP needs it in any world."""
        if device.type == "cuda":
            torch.cuda.set_device(device)
        self._choose_interface(backend)
        self._local_ranks.discover()
        keys = self._store.namespace("group")
        if self._store.check_peers is not None:
            keys = keys.clone()  # another connection, which gloo may block while it waits for a lost rank
        store = dist.PrefixStore("torch", keys)
        timeout = timedelta(seconds=backend.timeout_s)
        store.set_timeout(timeout)  # gloo uses the store's timeout when it reads the addresses of all ranks
        self._wait_for(
            partial(
                dist.init_process_group,
                backend.process_group_backend(),
                store=store,
                rank=self._rank_info.rank,
                world_size=self._rank_info.world_size,
                timeout=timeout,
                device_id=device if device.type == "cuda" else None,
            )
        )
        later = timeout
        if "nccl" in dist.get_backend_config():
            # By default, NCCL's thread terminates the process when the watchdog begins to examine the failure.
            later = timeout + timedelta(seconds=NCCL_EXTRA_S)
            assert dist.group.WORLD is not None
            nccl: Any = dist.group.WORLD._get_backend(device)
            nccl._set_default_timeout(later)
        self._set_timeout_of_subgroups(later)
        if self._local_ranks.own is None:
            return
        with closing(Listener(self._local_ranks.own)) as listener:
            # gloo returns before all ranks have connected: if a rank left now, others would fail in here.
            num_ready = torch.tensor([int(listener.ready)])
            dist.all_reduce(num_ready)
            if num_ready.item() == self._rank_info.world_size:
                sockets = listener.join(self._local_ranks.others, backend.timeout_s, self._store.check_peers)
                self.on_leave(lambda went_well: sockets.close())
                exchange.use(exchange.LocalExchanges(self._rank_info.rank, sockets))
                self.on_leave(lambda went_well: exchange.use(None))

    def _set_timeout_of_subgroups(self, timeout: timedelta) -> None:
        """Change the timeout that groups such as those of a mesh have by default: torch's is 10 min or 30 min."""
        c10d: Any = dist.distributed_c10d
        default = c10d._get_default_timeout
        c10d._get_default_timeout = lambda backend: timeout
        self.on_leave(lambda went_well: setattr(c10d, "_get_default_timeout", default))

    def _wait_for(self, init: Callable[[], None]) -> None:
        """Call `init`. In an elastic world, do not wait for a rank that is lost meanwhile, but raise PeerMissing."""
        if self._store.check_peers is None:
            init()
            return
        # By this number the ranks find each other. An attempt that failed has incremented it, but not on new ranks.
        dist.distributed_c10d._world.group_count = 0
        forming = call_in_daemon(init, "form")
        while not futures.wait([forming], POLL_S).done:
            try:
                self._store.check_peers()
            except PeerMissing:
                # If it does not end now, it waits for the lost rank, and cannot succeed later.
                futures.wait([forming], LOST_S)
                raise
        forming.result()

    def leave(self, went_well: bool) -> None:
        """Destroy the process group if it exists.

        Objects that refer to it, such as a DDP module, must be unreachable by now: such an object sometimes aborts the
        process at its exit (pytorch issue 190489).
        """
        while self._callbacks:
            self._callbacks.pop()(went_well)
        if self._rank_info.source != IMAGINED:  # the group of an imagined rank has no connections to close
            gc.collect()
        if dist.is_initialized():
            _destroy()

    def on_leave(self, callback: Callable[[bool], None]) -> None:
        """Call `callback(went_well)` before this job's group is destroyed. `callback` must not raise."""
        self._callbacks.append(callback)

    def _choose_interface(self, backend: Backend) -> None:
        """Choose the network interface of this group and of its later subgroups, until it is destroyed."""
        gather = partial(self._store.gather, "addresses")
        variables = choose_interface(self._rank_info, backend.interface, gather)
        # Lets gloo read the addresses of all ranks in one operation of the store, not in two operations for each.
        variables |= {"GLOO_ENABLE_STORE_V2_API": "1", **BUFFER}
        environment = ExitStack()
        environment.enter_context(environment_variables(variables, override=backend.interface is not None))
        self.on_leave(lambda went_well: environment.close())


def make_mesh(device: torch.device, **axes: int) -> DeviceMesh:
    """Return the mesh with these named axes, outermost first. All ranks must call it, once the group is formed."""
    with _disable_current_modes():  # a plan computes with fake tensors, but a mesh needs the values of its own
        return init_device_mesh(device.type, tuple(axes.values()), mesh_dim_names=tuple(axes))


def _destroy() -> None:
    """Destroy the group, or give up after DESTROY_S: gloo has been seen to wait forever after a complete job."""
    if torch.cuda.is_initialized():
        dist.destroy_process_group()  # NCCL needs the thread with this rank's device, and aborts by itself
        return
    try:
        call_in_daemon(dist.destroy_process_group, "destroy").result(DESTROY_S)
    except TimeoutError:
        log.warning("the process group could not be destroyed within %g s, and is given up", DESTROY_S)
