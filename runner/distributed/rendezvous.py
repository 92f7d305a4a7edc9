"""The rendezvous of a world's processes: each connects to the world's store, once."""

import json
import socket
import time
from collections.abc import Callable
from concurrent.futures import wait
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist

from runner.distributed.backend import Backend
from runner.distributed.environment import RankInfo
from runner.distributed.failures.signals import exit_with_parent, received, seconds_since_received
from runner.distributed.network import is_loopback
from runner.distributed.store_consensus import REPORT_TIMEOUT_S
from runner.distributed.world import World
from runner.distributed.world_store import set_tcp_timeouts
from runner.errors import InputError, Preempted
from runner.process.daemon_thread import call_in_daemon

JOIN_TIMEOUT_S = 120.0  # until the configuration is known
STOP_GRACE_S = 10.0  # for which a rank still looks for the others after a signal
TRY_S = 2.0  # between checks for signals: Python resumes a system call that a signal has interrupted
# A global, because a process joins its world once, whatever runs in it afterwards, such as the jobs of a sweep.
_joined: dict[RankInfo, World] = {}


def join(rank_info: RankInfo, backend: Backend, timeout_s: float = JOIN_TIMEOUT_S) -> World:
    """Connect this process to the store of its world, once per process. All ranks must call it.

    Raises InputError if the other ranks do not connect in time, without messages if rank 0 reports the failure.
    Raises Preempted if a signal stops this rank before all ranks have connected.
    """
    if rank_info not in _joined:
        if rank_info.has_parent:
            exit_with_parent()
        connection = _connect(rank_info, backend.init, timeout_s)
        set_tcp_timeouts(connection, backend.timeout_s)
        # A rank of another world that has reached this store by mistake must not read or change the keys of this one.
        store = None if connection is None else dist.PrefixStore(f"runner/{rank_info.world_id}", connection)
        complete = rank_info if store is None else _wait_for_all(store, rank_info, timeout_s)
        _joined[rank_info] = World(complete, store, backend)
    return _joined[rank_info]


def serve_store(host: str, port: int, loopback: bool, timeout_s: float) -> dist.TCPStore:
    """Serve a world's store in this process. port: 0 for a free port. loopback: listen on that interface only."""
    # Without a listening socket, a store listens on every interface.
    listener = socket.create_server((host, port)) if loopback else None
    return dist.TCPStore(
        host,
        listener.getsockname()[1] if listener else port,
        is_master=True,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        master_listen_fd=listener.detach() if listener else None,
    )


def _connect(rank_info: RankInfo, init: str, timeout_s: float) -> dist.Store | None:
    if rank_info.world_size == 1:
        return None
    if init.startswith("file://"):
        return dist.FileStore(init.removeprefix("file://"), rank_info.world_size)
    host, port, serves = rank_info.master_addr, rank_info.master_port, rank_info.hosts_store
    if init.startswith("tcp://"):
        host, _, text = init.removeprefix("tcp://").rpartition(":")
        port, serves = int(text), rank_info.rank == 0
    try:
        if not serves:
            return _connect_as_client(host, port, timeout_s)
        found = socket.getaddrinfo(host, port)  # fails at once if the name does not resolve
        is_local = rank_info.on_one_machine and all(is_loopback(str(address[0])) for *_, address in found)
        return serve_store(host, port, is_local, timeout_s)
    except (RuntimeError, OSError) as error:
        action = "serve" if serves else "reach"
        raise InputError(
            f"rank {rank_info.rank} of {rank_info.world_size} on {socket.gethostname()} could not {action} the "
            f"store at {host}:{port} within {timeout_s:g} s ({str(error).splitlines()[0]}); check MASTER_ADDR, "
            "MASTER_PORT and that every rank was started"
        ) from None


def _connect_as_client(host: str, port: int, timeout_s: float) -> dist.Store:
    """Connect to a store that another process serves, or is about to serve."""
    start = time.monotonic()
    deadline = start + timeout_s
    while True:  # torch itself would log thirty lines at the timeout
        try:
            left_s = max(deadline - time.monotonic(), 0.1)
            socket.create_connection((host, port), timeout=min(left_s, TRY_S)).close()
            break
        except OSError:
            if time.monotonic() > deadline:
                raise
            _check_stop(start)
            time.sleep(0.1)
    timeout = timedelta(seconds=timeout_s)
    return _connect_before(deadline, lambda: dist.TCPStore(host, port, timeout=timeout, wait_for_workers=False))


def _connect_before(deadline: float, connect: Callable[[], dist.Store]) -> dist.Store:
    """Return `connect()`. Raise TimeoutError if the listening process does not respond: torch would wait forever."""
    connecting, start = call_in_daemon(connect, "connect"), time.monotonic()
    while not wait([connecting], TRY_S).done:
        if time.monotonic() >= max(deadline, start + 1.0):
            raise TimeoutError("the process there accepts connections and does not respond")
        _check_stop(start)
    return connecting.result()


def _wait_for_all(store: dist.Store, rank_info: RankInfo, timeout_s: float) -> RankInfo:
    """Wait until all ranks have connected. Return the info, with the fields that the environment did not define."""
    arrivals = dist.PrefixStore(f"here{rank_info.restart}", store)
    arrivals.set(str(rank_info.rank), socket.gethostname())
    if rank_info.rank == 0:
        deadline = time.monotonic() + timeout_s
        ranks = [str(rank) for rank in range(rank_info.world_size)]
        missing: list[int] = []
        if not _poll(partial(arrivals.check, ranks), deadline):
            missing = [int(rank) for rank in ranks if not _poll(partial(arrivals.check, [rank]), deadline)]
        # One operation for all hosts, so that the number of operations does not grow with the number of ranks.
        hosts = [] if missing else [host.decode() for host in arrivals.multi_get(ranks)]
        arrivals.set("hosts", json.dumps(hosts))
        if missing:
            raise InputError(
                f"ranks {missing} of {rank_info.world_size} did not appear within launcher.join_timeout_s="
                f"{timeout_s:g}; check that every one was started, with the same MASTER_ADDR and MASTER_PORT"
            )
    elif not _poll(partial(arrivals.check, ["hosts"]), time.monotonic() + timeout_s + REPORT_TIMEOUT_S):
        raise InputError(f"rank 0 of {rank_info.world_size} did not appear within {timeout_s:g} s")
    elif not (hosts := json.loads(arrivals.get("hosts"))):  # rank 0 reports the missing ranks
        raise InputError
    return _count_local_ranks(rank_info, hosts) if rank_info.inferred else rank_info


def _count_local_ranks(rank_info: RankInfo, hosts: list[str]) -> RankInfo:
    """Return the info with local rank and local world size counted among the ranks with the same host name."""
    own = [rank for rank, host in enumerate(hosts) if host == hosts[rank_info.rank]]
    counted: dict[str, Any] = {"local_rank": own.index(rank_info.rank), "local_world_size": len(own)}
    rank_info = replace(rank_info, **{name: counted[name] for name in rank_info.inferred})
    on_one_machine = rank_info.on_one_machine and rank_info.local_world_size == rank_info.world_size
    return replace(rank_info, on_one_machine=on_one_machine)


def _poll(find: Callable[[], Any], deadline: float) -> Any:
    """Return the first true result of `find`, or the last one in time. store.wait would log lines at the timeout."""
    start = time.monotonic()
    try:
        while not (found := find()) and time.monotonic() < deadline:
            _check_stop(start)
            time.sleep(0.02)
    except RuntimeError:  # the process that served the store has exited
        return False
    return found


def _check_stop(start: float) -> None:
    """Raise Preempted if both a signal and `start`, when the wait began, are more than STOP_GRACE_S ago."""
    if (reason := received()) and min(seconds_since_received(), time.monotonic() - start) > STOP_GRACE_S:
        raise Preempted(reason) from None
