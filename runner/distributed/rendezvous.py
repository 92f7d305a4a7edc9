"""The rendezvous of a world's processes: each connects to the world's store, once."""

import json
import socket
import time
from collections.abc import Callable
from concurrent import futures
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist

from runner.distributed.backend import Backend
from runner.distributed.environment import JOIN_TIMEOUT_S, RankInfo
from runner.distributed.failures.signals import exit_with_parent
from runner.distributed.membership import FIRST, KEYS
from runner.distributed.network import is_loopback
from runner.distributed.store_consensus import REPORT_TIMEOUT_S
from runner.distributed.world import World
from runner.distributed.world_store import WorldStore, name_ranks, set_tcp_timeouts, signaled_since
from runner.errors import InputError, Preempted, print_messages
from runner.process.daemon_thread import call_in_daemon

SILENT_S = 10.0  # after which a rank that still waits for others prints which ones
TRY_S = 2.0  # between checks for signals: Python resumes a system call that a signal has interrupted
# A global, because a process joins its world once, whatever runs in it afterwards, such as the jobs of a sweep.
_joined: dict[RankInfo, World] = {}


def join(
    rank_info: RankInfo,
    backend: Backend,
    timeout_s: float = JOIN_TIMEOUT_S,
    check: Callable[[Any], None] = lambda facts: None,
) -> World:
    """Connect this process to the store of its world, once per process. All ranks must call it.

    Raises InputError if the other ranks do not connect in time, without messages if rank 0 reports the failure.
    Raises Preempted if a signal stops this rank before all ranks have connected. A process that joins an elastic world
    later also raises JobEnded, JobFailed if that world no longer exists, and Refused if `check` does.
    """
    if rank_info not in _joined:
        if rank_info.has_parent:
            exit_with_parent()
        connection = _connect(rank_info, backend.init, timeout_s)
        set_tcp_timeouts(connection, backend.timeout_s)
        # A rank of another world that has reached this store by mistake must not read or change the keys of this one.
        store = None if connection is None else dist.PrefixStore(world_prefix(rank_info.world_id), connection)
        if connection is not None and elastic_keys(connection, rank_info.world_id).check([FIRST]):  # it has begun
            world = World(rank_info, store, backend)
            world.join_later(check)
        else:
            complete = rank_info if store is None else _wait_for_all(store, rank_info, timeout_s)
            world = World(complete, store, backend)
        _joined[rank_info] = world
    return _joined[rank_info]


def world_prefix(world_id: str) -> str:
    """Return the prefix of the keys of a world in its store."""
    return f"runner/{world_id}"


def elastic_keys(store: dist.Store, world_id: str) -> dist.Store:
    """Return the keys of `Membership` in the store of this world's ranks."""
    return dist.PrefixStore(f"{world_prefix(world_id)}/{KEYS}", store)


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
    if rank_info.world_size == 1 and not rank_info.may_grow:
        return None
    if init.startswith("file://"):
        return dist.FileStore(init.removeprefix("file://"), rank_info.world_size)
    host, port, serves = rank_info.master_addr, rank_info.master_port, rank_info.hosts_store
    if init.startswith("tcp://"):
        host, _, text = init.removeprefix("tcp://").rpartition(":")
        port, serves = int(text), rank_info.rank == 0
    try:
        if not serves:
            return _connect_as_client(host, port, rank_info, timeout_s)
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


class _Wait:
    """A wait for other ranks, which ends STOP_GRACE_S after a signal, and does not remain silent.

    what: returns what the rank waits for; None if another rank prints that.
    """

    def __init__(self, timeout_s: float, what: Callable[[], str] | None = None):
        self._start, self._what, self._timeout_s = time.monotonic(), what, timeout_s
        self.deadline = self._start + timeout_s

    def pause(self, seconds: float = 0.0) -> None:
        """Sleep. After SILENT_S, print once what this rank waits for. Raise Preempted after a signal."""
        if reason := signaled_since(self._start):
            raise Preempted(reason) from None
        if self._what and time.monotonic() - self._start > SILENT_S:
            print_messages([f"waiting for {self._what()}, at most {self._timeout_s:g} s"])
            self._what = None
        time.sleep(seconds)


def _connect_as_client(host: str, port: int, rank_info: RankInfo, timeout_s: float) -> dist.Store:
    """Connect to a store that another process serves, or is about to serve."""
    prints = rank_info.local_rank == 0 or rank_info.rank == 1
    wait = _Wait(timeout_s, (lambda: f"rank 0, which serves the store at {host}:{port}") if prints else None)
    while True:  # torch itself would log thirty lines at the timeout
        try:
            left_s = max(wait.deadline - time.monotonic(), 0.1)
            socket.create_connection((host, port), timeout=min(left_s, TRY_S)).close()
            break
        except OSError:
            if time.monotonic() > wait.deadline:
                raise
            wait.pause(0.1)
    timeout = timedelta(seconds=timeout_s)
    return _connect_before(wait.deadline, lambda: dist.TCPStore(host, port, timeout=timeout, wait_for_workers=False))


def _connect_before(deadline: float, connect: Callable[[], dist.Store]) -> dist.Store:
    """Return `connect()`. Raise TimeoutError if the listening process does not respond: torch would wait forever."""
    connecting, start = call_in_daemon(connect, "connect"), time.monotonic()
    wait = _Wait(deadline - start)
    while not futures.wait([connecting], TRY_S).done:
        if time.monotonic() >= max(deadline, start + 1.0):
            raise TimeoutError("the process there accepts connections and does not respond")
        wait.pause()
    return connecting.result()


def _wait_for_all(store: dist.Store, rank_info: RankInfo, timeout_s: float) -> RankInfo:
    """Wait until all ranks have connected. Return the info, with the fields that the environment did not define."""
    arrivals, world = dist.PrefixStore(f"here{rank_info.restart}", store), WorldStore(rank_info, store)
    arrivals.set(str(rank_info.rank), socket.gethostname())
    size = rank_info.world_size

    def missing() -> list[int]:
        try:
            return [rank for rank in range(size) if not arrivals.check([str(rank)])]
        except RuntimeError:  # the process that served the store has exited
            return [*range(size)]

    if rank_info.rank == 0:
        ranks = [str(rank) for rank in range(size)]
        # In a shell of `srun -n2 --pty bash`, nothing runs the command as the other task.
        task = " (each task of srun must run this command)" if rank_info.source == "srun" else ""
        wait = _Wait(timeout_s, lambda: f"{name_ranks(missing())} of {size}{task}")
        late = [] if _poll(partial(arrivals.check, ranks), wait, world) else missing()
        # One operation for all hosts, so that the number of operations does not grow with the number of ranks.
        hosts = [] if late else [host.decode() for host in arrivals.multi_get(ranks)]
        arrivals.set("hosts", json.dumps(hosts))
        if late:
            raise InputError(
                f"ranks {late} of {size} did not appear within launcher.join_timeout_s={timeout_s:g}; check that every "
                "one was started, with the same MASTER_ADDR and MASTER_PORT"
            )
    elif not _poll(partial(arrivals.check, ["hosts"]), _Wait(timeout_s + REPORT_TIMEOUT_S), world):
        raise InputError(f"rank 0 of {size} did not appear within {timeout_s:g} s")
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


def _poll(find: Callable[[], bool], wait: _Wait, world: WorldStore) -> bool:
    """Return True if `find` does so in time. store.wait would log lines at the timeout.

    Raise Preempted after a signal to this rank or to another one, which then sets no more keys.
    """
    try:
        while not (found := find()) and time.monotonic() < wait.deadline:
            if reason := world.stop_reason():
                raise Preempted(reason)
            wait.pause(0.02)
    except Preempted as error:
        world.announce_stop(str(error))
        raise
    except RuntimeError:  # the process that served the store has exited
        return False
    return found
