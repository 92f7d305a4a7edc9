"""How long this process waits for a machine that has gone without a word: as long as it is told, not as TCP does."""

import os
import socket
import stat
from contextlib import suppress

import torch.distributed as dist

_PROBES = 3


def bound_silence(store: dist.Store | None, timeout_s: float) -> None:
    """Let this process's connections to the store fail where no sign of its machine has come for so long.

    A machine that is cut off, or has lost its power, closes none. TCP itself sends again for a quarter of an hour
    (tcp_retries2), and a connection on which nothing is to be sent is kept for ever. Linux only.
    """
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    if not isinstance(store, dist.TCPStore) or not hasattr(socket, "TCP_USER_TIMEOUT"):
        return
    numbers: list[str] = []
    with suppress(OSError):  # some containers have no /proc
        numbers = os.listdir("/proc/self/fd")
    for number in map(int, numbers):
        with suppress(OSError):  # closed meanwhile, or not connected
            if not stat.S_ISSOCK(os.fstat(number).st_mode):
                continue
            waits = os.get_blocking(number)
            with socket.socket(fileno=os.dup(number)) as connection:
                os.set_blocking(number, waits)  # which Python sets, of all copies, to what is its default just now
                if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.getpeername()[1] == store.port:
                    _bound(connection, timeout_s)


def _bound(connection: socket.socket, timeout_s: float) -> None:
    pause_s = max(1, round(timeout_s / (_PROBES + 1)))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, pause_s)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, pause_s)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(1000 * timeout_s))
