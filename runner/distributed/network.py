"""Which of this machine's network interfaces the ranks of a run listen on and talk over."""

import os
import socket
import struct
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from ipaddress import ip_address
from pathlib import Path

import torch.distributed as dist

from runner.distributed.environment import RankInfo
from runner.errors import InputError

GLOO, NCCL, TENSORPIPE = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME"
_GET_ADDRESS = 0x8915  # Linux's SIOCGIFADDR


@contextmanager
def meeting_at_once() -> Iterator[None]:
    """Let gloo ask the store for the addresses of all ranks in one operation, and not of each in two."""
    name = "GLOO_ENABLE_STORE_V2_API"
    if name in os.environ:  # the user's own
        yield
        return
    os.environ[name] = "1"
    try:
        yield
    finally:
        del os.environ[name]


@contextmanager
def listening_on(interface: str | None, libraries: Sequence[str], override: bool = True) -> Iterator[None]:
    """Let what these libraries open meanwhile use the interface; None leaves them theirs.

    override: also where the user's own environment has named one.
    """
    names = [name for name in libraries if interface and (override or name not in os.environ)]
    before = {name: os.environ[name] for name in names if name in os.environ}
    os.environ.update(dict.fromkeys(names, interface or ""))
    try:
        yield
    finally:
        for name in names:
            del os.environ[name]
        os.environ.update(before)


def loopback() -> str:
    """The interface of this machine that no other one reaches."""
    return "lo0" if sys.platform == "darwin" else "lo"


def choose_interface(
    rank_info: RankInfo, wanted: str | None, addresses: dist.Store
) -> tuple[str | None, Sequence[str]]:
    """The interface for this rank, or None for the libraries' own choice, and the libraries that are told of it.

    All ranks must call it; `addresses` is a store of their own for it. Raises InputError where the wanted one is none.
    """
    if wanted:
        return wanted, (GLOO, NCCL, TENSORPIPE)
    if rank_info.on_one_machine:
        return loopback(), (GLOO, TENSORPIPE)  # nccl shares memory there, and takes no loopback
    if not rank_info.master_addr:
        return None, ()
    mine = address_towards(rank_info.master_addr)
    addresses.set(str(rank_info.rank), mine)
    if is_loopback(mine):
        # A master's own name is often an alias of its loopback; the address of another machine shows the way out.
        others = [other.decode() for other in addresses.multi_get([str(rank) for rank in range(rank_info.world_size)])]
        outside = next((other for other in others if not is_loopback(other)), None)
        mine = mine if outside is None else address_towards(outside)
    found = interface_of(mine)
    return found, ((GLOO, TENSORPIPE) if found == loopback() else (GLOO, NCCL, TENSORPIPE))


def check_interface(wanted: str | None) -> list[str]:
    """What is wrong with the name, one message."""
    known = [name for _, name in socket.if_nameindex()]
    if wanted is None or wanted in known:
        return []
    return [f"backend.interface={wanted}: this machine has no such network interface, only {', '.join(sorted(known))}"]


def address_towards(host: str, key: str = "MASTER_ADDR") -> str:
    """This machine's own address on the way to a host; nothing is sent.

    Raises InputError for a name that does not resolve or an address that no route leads to; the key has named it.
    """
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(where)
            return probe.getsockname()[0]
    except OSError as error:
        raise InputError(f"{key}={host} cannot be reached from {socket.gethostname()} ({error})") from None


def interface_of(address: str) -> str | None:
    """The interface that has the address, or None where this system does not say."""
    if is_loopback(address):
        return loopback()
    return next((name for _, name in socket.if_nameindex() if address in _addresses_of(name)), None)


def _addresses_of(interface: str) -> list[str]:
    if not sys.platform.startswith("linux"):
        return []
    import fcntl

    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), _GET_ADDRESS, struct.pack("256s", interface.encode()))
            found.append(socket.inet_ntoa(answer[20:24]))
        except OSError:
            pass  # it has no IPv4 address
    table = Path("/proc/net/if_inet6")  # address, index, prefix, scope, flags, name
    rows = [line.split() for line in table.read_text().splitlines()] if table.exists() else []
    return found + [str(ip_address(bytes.fromhex(row[0]))) for row in rows if row[5] == interface]


def is_loopback(address: str) -> bool:
    """Whether only this machine reaches the address, which may name its interface behind a %."""
    return ip_address(address.partition("%")[0]).is_loopback
