"""How the processes of a world find each other: its store, connected to once per process."""

import json
import queue
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from runner.distributed.agreement import SPEAK_TIMEOUT_S
from runner.distributed.backend import Backend
from runner.distributed.environment import RankInfo
from runner.distributed.left_waiting import start_waiting
from runner.distributed.network import is_loopback
from runner.distributed.parent import end_with_parent
from runner.distributed.signals import received, seconds_since
from runner.distributed.silence import bound_silence
from runner.distributed.world import World
from runner.errors import InputError, Preempted

JOIN_TIMEOUT_S = 120.0  # until the configuration is known
TOLD_S = 10.0
TRY_S = 2.0  # Python goes on with a system call that a signal has interrupted
_joined: dict[RankInfo, World] = {}


def join(rank_info: RankInfo, backend: Backend, timeout_s: float = JOIN_TIMEOUT_S) -> World:
    """Connect this process to the store of its world, once per process. All ranks must call it.

    Raises InputError when the others cannot be found within the timeout, without a message where rank 0 has that; and
    Preempted where a signal came to this one and it does not find them either.
    """
    if rank_info not in _joined:
        if rank_info.has_parent:
            end_with_parent()
        store = _connect(rank_info, backend.init, timeout_s)
        bound_silence(store, backend.timeout_s)
        own = rank_info if store is None else _await_all(store, rank_info, timeout_s)
        _joined[rank_info] = World(own, store, backend)
    return _joined[rank_info]


def _connect(rank_info: RankInfo, init: str, timeout_s: float) -> dist.Store | None:
    if rank_info.world_size == 1:
        return None
    if init.startswith("file://"):
        return dist.FileStore(init.removeprefix("file://"), rank_info.world_size)
    host, port, serve = rank_info.master_addr, rank_info.master_port, rank_info.hosts_store
    if init.startswith("tcp://"):
        host, _, text = init.removeprefix("tcp://").rpartition(":")
        port, serve = int(text), rank_info.rank == 0
    try:
        return _serve(host, port, rank_info, timeout_s) if serve else _find(host, port, rank_info, timeout_s)
    except (RuntimeError, OSError) as error:
        what = "could serve" if serve else "found"
        raise InputError(
            f"rank {rank_info.rank} of {rank_info.world_size} on {socket.gethostname()} {what} no world at "
            f"{host}:{port} within {timeout_s:g} s ({str(error).splitlines()[0]}); check MASTER_ADDR, MASTER_PORT and "
            "that every rank was started"
        ) from None


def _await_all(store: dist.Store, rank_info: RankInfo, timeout_s: float) -> RankInfo:
    """Wait until all ranks are here. Returns the rank's info with what the environment did not say of it."""
    here = dist.PrefixStore(f"here{rank_info.restart}", store)
    here.set(str(rank_info.rank), socket.gethostname())
    if rank_info.rank == 0:
        deadline = time.monotonic() + timeout_s
        ranks = [str(rank) for rank in range(rank_info.world_size)]
        absent: list[int] = []
        if not _come(here, ranks, deadline):
            absent = [rank for rank in range(rank_info.world_size) if not _come(here, [str(rank)], deadline)]
        # In one operation for all of them, as each wait is: of a thousand ranks, none does a thousand.
        hosts = [] if absent else [host.decode() for host in here.multi_get(ranks)]
        here.set("hosts", json.dumps(hosts))
        here.set("absent", json.dumps(absent))
        if absent:
            raise InputError(
                f"ranks {absent} of {rank_info.world_size} did not appear within launcher.join_timeout_s="
                f"{timeout_s:g}; check that every one was started, with the same MASTER_ADDR and MASTER_PORT"
            )
    elif not _come(here, ["absent"], time.monotonic() + timeout_s + SPEAK_TIMEOUT_S):
        raise InputError(f"rank 0 of {rank_info.world_size} did not appear within {timeout_s:g} s")
    elif json.loads(here.get("absent")):
        raise InputError
    return _counted(rank_info, json.loads(here.get("hosts"))) if rank_info.guessed else rank_info


def _counted(rank_info: RankInfo, hosts: list[str]) -> RankInfo:
    """The info, counted among the ranks whose hosts, by rank, have its own one's name."""
    own = [rank for rank, host in enumerate(hosts) if host == hosts[rank_info.rank]]
    counted: dict[str, Any] = {"local_rank": own.index(rank_info.rank), "local_world_size": len(own)}
    rank_info = replace(rank_info, **{name: counted[name] for name in rank_info.guessed})
    return replace(
        rank_info, on_one_machine=rank_info.on_one_machine and rank_info.local_world_size == rank_info.world_size
    )


def _come(store: dist.Store, keys: list[str], deadline: float) -> bool:
    """Whether all are set in time; asked again and again, for a store's own waiting ends with lines of its own."""
    begun = time.monotonic()
    try:
        while not (found := store.check(keys)) and time.monotonic() < deadline:
            _give_up_if_asked(begun)
            time.sleep(0.02)
    except RuntimeError:  # whoever served it has given up
        return False
    return found


def _give_up_if_asked(begun: float) -> None:
    """A rank that is asked to stop looks for the others to tell them, but not for long. begun: to look, monotonic."""
    if (why := received()) and min(seconds_since(), time.monotonic() - begun) > TOLD_S:
        raise Preempted(why) from None


def _find(host: str, port: int, rank_info: RankInfo, timeout_s: float) -> dist.Store:
    # torch's own waiting ends in thirty lines on the terminal.
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            left_s = max(deadline - time.monotonic(), 0.1)
            socket.create_connection((host, port), timeout=min(left_s, TRY_S)).close()
            break
        except OSError:
            if time.monotonic() > deadline:
                raise
            _give_up_if_asked(deadline - timeout_s)
            time.sleep(0.1)
    timeout = timedelta(seconds=timeout_s)
    return _made_before(
        deadline,
        lambda: dist.TCPStore(
            host, port, rank_info.world_size, is_master=False, timeout=timeout, wait_for_workers=False
        ),
    )


def _made_before(deadline: float, connect: Callable[[], dist.Store]) -> dist.Store:
    """What it makes. Raises TimeoutError where whoever listens there does not answer: torch would wait without end."""
    made: queue.Queue[dist.Store | Exception] = queue.Queue()

    def make() -> None:
        try:
            made.put(connect())
        except Exception as error:
            made.put(error)

    start_waiting(make, "connect")
    begun = time.monotonic()
    deadline = max(deadline, begun + 1.0)
    while True:
        try:
            store = made.get(timeout=min(max(deadline - time.monotonic(), 0.0), TRY_S))
        except queue.Empty:
            if time.monotonic() >= deadline:
                raise TimeoutError("what listens there accepts connections and says nothing") from None
            _give_up_if_asked(begun)
            continue
        if isinstance(store, Exception):
            raise store
        return store


def _serve(host: str, port: int, rank_info: RankInfo, timeout_s: float) -> dist.Store:
    socket.getaddrinfo(host, port)  # one that does not resolve is told at once
    return serve_store(host, port, rank_info.on_one_machine and _resolves_to_loopback(host), timeout_s)


def serve_store(host: str, port: int, loopback: bool, timeout_s: float) -> dist.TCPStore:
    """A world's store, served by this process; port 0 is a free one. loopback: no other machine reaches it."""
    # Given a listening socket, the store keeps to that; asked for a port, it listens on every interface.
    listener = socket.create_server((host, port)) if loopback else None
    return dist.TCPStore(
        host,
        listener.getsockname()[1] if listener else port,
        is_master=True,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        master_listen_fd=listener.detach() if listener else None,
    )


def _resolves_to_loopback(host: str) -> bool:
    return all(is_loopback(str(where[4][0])) for where in socket.getaddrinfo(host, None, socket.AF_INET))
