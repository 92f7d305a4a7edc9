"""Where the processes of a world meet: its store, connected to once per process."""

import socket
from datetime import timedelta
from ipaddress import ip_address

import torch.distributed as dist

from runner.backend import Backend
from runner.config import InputError
from runner.launchers.env import Place
from runner.launchers.parent import end_with_parent
from runner.world import World

JOIN_TIMEOUT_S = 120.0  # until the configuration is known
_joined: dict[Place, World] = {}


def join(place: Place, backend: Backend, timeout_s: float = JOIN_TIMEOUT_S) -> World:
    """Connect this process to the store of its world, once per process. All ranks must call it.

    Raises InputError when the others cannot be found within the timeout.
    """
    if place not in _joined:
        if place.has_parent:
            end_with_parent()
        _joined[place] = World(place, _connect(place, backend.init, timeout_s), backend)
    return _joined[place]


def _connect(place: Place, init: str, timeout_s: float) -> dist.Store | None:
    if place.world_size == 1:
        return None
    if init.startswith("file://"):
        return dist.FileStore(init.removeprefix("file://"), place.world_size)
    host, port, serve = place.master_addr, place.master_port, place.hosts_store
    if init.startswith("tcp://"):
        host, _, text = init.removeprefix("tcp://").rpartition(":")
        port, serve = int(text), place.rank == 0
    try:
        return _serve(host, port, place, timeout_s) if serve else _find(host, port, place, timeout_s)
    except (RuntimeError, OSError) as error:
        what = "could serve" if serve else "found"
        raise InputError(
            f"rank {place.rank} of {place.world_size} on {socket.gethostname()} {what} no world at {host}:{port} "
            f"within {timeout_s:g} s ({str(error).splitlines()[0]}); check MASTER_ADDR, MASTER_PORT and that every "
            "rank was started"
        ) from None


def _find(host: str, port: int, place: Place, timeout_s: float) -> dist.Store:
    timeout = timedelta(seconds=timeout_s)
    return dist.TCPStore(host, port, place.world_size, is_master=False, timeout=timeout, wait_for_workers=False)


def _serve(host: str, port: int, place: Place, timeout_s: float) -> dist.Store:
    """A store on the loopback alone where the master is there and so are all ranks; torch listens everywhere."""
    listener = None
    if place.on_one_machine and _resolves_to_loopback(host):
        listener = socket.create_server((host, port)).detach()
    return dist.TCPStore(
        host,
        port,
        place.world_size,
        is_master=True,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        master_listen_fd=listener,
    )


def _resolves_to_loopback(host: str) -> bool:
    addresses = {where[4][0] for where in socket.getaddrinfo(host, None, socket.AF_INET)}
    return all(ip_address(address).is_loopback for address in addresses)
