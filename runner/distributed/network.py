"""The network interface of this machine on which the ranks of a run listen and communicate."""

import os
import socket
import struct
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from ipaddress import ip_address
from pathlib import Path

from runner.distributed.environment import RankInfo
from runner.errors import InputError

GLOO, NCCL, TENSORPIPE = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME"
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
_GET_ADDRESS = 0x8915  # Linux's SIOCGIFADDR


@contextmanager
def environment_variables(values: Mapping[str, str], override: bool = True) -> Iterator[None]:
    """Set these variables within the context. override: replace values that are set already."""
    values = {name: value for name, value in values.items() if override or name not in os.environ}
    before = {name: os.environ[name] for name in values if name in os.environ}
    os.environ.update(values)
    try:
        yield
    finally:
        for name in values:
            del os.environ[name]
        os.environ.update(before)


def choose_interface(rank_info: RankInfo, requested: str | None, gather: Callable[[str], list[str]]) -> dict[str, str]:
    """Return the environment variables that select this rank's interface; {} for the libraries' own choice.

    All ranks must call it. Raises InputError if an address is invalid or unreachable. gather: returns the
    texts of all ranks.
    """
    if requested:
        return dict.fromkeys((GLOO, NCCL, TENSORPIPE), requested)
    if rank_info.on_one_machine:
        return loopback_only()
    if not rank_info.master_addr:
        return {}
    own = address_towards(rank_info.master_addr)
    addresses = gather(own)
    if is_loopback(own):
        # The master's name is often an alias of its loopback address; the route to another machine has the interface.
        outside = next((address for address in addresses if not is_loopback(address)), None)
        if outside is None:
            return loopback_only()
        own = address_towards(outside)
    found = interface_of(own)
    return dict.fromkeys((GLOO, NCCL, TENSORPIPE), found) if found else {}


def loopback_only() -> dict[str, str]:
    """Return the environment variables that select the loopback interface, which no other machine can reach.

    They do not include NCCL's, which uses shared memory on one machine and does not accept a loopback interface.
    """
    return dict.fromkeys((GLOO, TENSORPIPE), LOOPBACK)


def check_interface(requested: str | None) -> list[str]:
    """Return a message if this machine has no interface of that name."""
    known = [name for _, name in socket.if_nameindex()]
    if requested is None or requested in known:
        return []
    known_names = ", ".join(sorted(known))
    return [f"backend.interface={requested}: this machine has no such network interface, only {known_names}"]


def address_towards(host: str, key: str = "MASTER_ADDR") -> str:
    """Return this machine's address on the route to a host, without sending. Raise InputError if there is none."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)
            own: str = probe.getsockname()[0]
            return own
    except OSError as error:
        raise InputError(f"{key}={host} cannot be reached from {socket.gethostname()} ({error})") from None


def interface_of(address: str) -> str | None:
    """Return the interface that has the address; None if the system does not list it."""
    return next((name for _, name in socket.if_nameindex() if address in _addresses_of(name)), None)


def is_loopback(address: str) -> bool:
    """Return True if only this machine can reach the address, which may end with % and an interface."""
    return ip_address(address.partition("%")[0]).is_loopback


def _addresses_of(interface: str) -> list[str]:
    if not sys.platform.startswith("linux"):
        return []
    import fcntl

    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):  # it has no IPv4 address
        reply = fcntl.ioctl(probe.fileno(), _GET_ADDRESS, struct.pack("256s", interface.encode()))
        found.append(socket.inet_ntoa(reply[20:24]))
    table = Path("/proc/net/if_inet6")  # address, index, prefix, scope, flags, name
    rows = [line.split() for line in table.read_text().splitlines()] if table.exists() else []
    return found + [str(ip_address(bytes.fromhex(row[0]))) for row in rows if row[5] == interface]
