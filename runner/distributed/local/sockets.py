"""Sockets between the ranks of one machine, one for each pair of them, and their messages.

The sockets are in Linux's abstract namespace: they need no file, no other machine reaches them, and the system reports
for each connection which process has opened it.
"""

import contextlib
import os
import socket
import struct
import time
import weakref
from collections.abc import Callable, Mapping

from runner.distributed.failures.heartbeat import RankProcess
from runner.distributed.failures.peer_failure import PeerMissing

LARGEST = 65_536  # bytes of a message, which must fit into the system's send buffer
JOIN_S = 60.0  # for a rank to connect
TICK_S = 0.5  # after which a wait checks its deadline
Tag = tuple[int, int]  # identifies a group of ranks, and one of its exchanges by their number
_HEADER = struct.Struct("=QQ")
_CREDENTIALS = struct.Struct("=iII")  # process, user, group
_TIME = struct.Struct("@ll")  # seconds, microseconds
_open: "weakref.WeakSet[LocalSockets]" = weakref.WeakSet()  # a global, because hooks of a fork have no arguments


class LocalSockets:
    """This rank's sockets by the rank at the other end. One thread may use them at a time.

    `send` and `receive` raise PeerMissing if the other rank has exited, or is not ready by the deadline. Then all
    sockets are shut down, so that the ranks that wait for this one notice at once.
    """

    def __init__(self, sockets: Mapping[int, socket.socket], timeout_s: float):
        self._sockets, self._timeout_s = dict(sockets), timeout_s
        self._buffer = bytearray(_HEADER.size + LARGEST)
        self._early: dict[tuple[int, Tag], bytearray] = {}  # messages that arrived before a `receive` with their tag
        for each in self._sockets.values():
            each.setblocking(True)
            # Set on the socket, because Python's own timeout needs one more system call each time.
            for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
                each.setsockopt(socket.SOL_SOCKET, option, _TIME.pack(*divmod(int(TICK_S * 1e6), 1_000_000)))
        _open.add(self)

    @property
    def ranks(self) -> list[int]:
        return sorted(self._sockets)

    def deadline(self) -> float:
        """Return the end of the timeout of an exchange that starts now, on the monotonic clock."""
        return time.monotonic() + self._timeout_s

    def send(self, rank: int, tag: Tag, data: bytes | bytearray | memoryview, deadline: float) -> None:
        """Send at most LARGEST bytes, without waiting until they are received."""
        while True:
            try:
                self._sockets[rank].sendmsg([_HEADER.pack(*tag), data])
                return
            except BlockingIOError:
                self._check_deadline(rank, "received", deadline)
            except ConnectionError:
                raise self._lost(rank) from None

    def receive(self, rank: int, tag: Tag, deadline: float) -> bytearray:
        """Return the data that the rank sends with the tag."""
        while True:
            if self._early and (early := self._early.pop((rank, tag), None)) is not None:
                return early
            try:
                size = self._sockets[rank].recv_into(self._buffer)
            except BlockingIOError:
                self._check_deadline(rank, "sent", deadline)
                continue
            except ConnectionError:  # the other end was closed with unread messages
                size = 0
            if not size:
                raise self._lost(rank)
            found = _HEADER.unpack_from(self._buffer)
            data = self._buffer[_HEADER.size : size]
            if found == tag:
                return data
            self._early[rank, found] = data

    def shut_down(self) -> None:
        """End all waits at the other ends, and in other threads of this process."""
        for each in self._sockets.values():
            with contextlib.suppress(OSError):  # the other end is closed
                each.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        for each in self._sockets.values():
            each.close()

    def _check_deadline(self, rank: int, action: str, deadline: float) -> None:
        if time.monotonic() >= deadline:
            self.shut_down()
            raise PeerMissing(f"rank {rank} has {action} nothing for {self._timeout_s:g} s")

    def _lost(self, rank: int) -> PeerMissing:
        self.shut_down()
        return PeerMissing(f"rank {rank} has closed its connection to this one")


class Listener:
    """The socket to which the other ranks of the machine connect; closed by `close` or `join`."""

    def __init__(self, own: RankProcess):
        self._own, self.ready = own, False  # ready: this process listens, which needs Linux
        self._socket: socket.socket | None = None
        with contextlib.suppress(OSError):  # not Linux, or another process has the address
            self._socket = _new()
            self._socket.bind(_address(own))
            self._socket.listen(4096)  # the system uses its own limit if that is lower
            self.ready = True

    def join(
        self, others: Mapping[int, RankProcess], timeout_s: float, check_peers: Callable[[], None] | None = None
    ) -> LocalSockets:
        """Connect to the lower ranks and wait for the others, once all of them listen. All of them must call it.

        check_peers: raises PeerMissing if a rank was lost.
        """
        assert self._socket is not None
        joined: dict[int, socket.socket] = {}
        try:
            for rank in sorted(others):
                if rank < self._own.rank:
                    joined[rank] = _connect(others[rank])
            expected = {process.pid: rank for rank, process in others.items() if rank > self._own.rank}
            self._socket.settimeout(TICK_S)
            deadline = time.monotonic() + min(timeout_s, JOIN_S)
            while expected:
                try:
                    connection, _ = self._socket.accept()
                except TimeoutError:
                    if check_peers is not None:
                        check_peers()
                    if time.monotonic() > deadline:
                        raise
                    continue
                if (pid := _process_of(connection)) in expected:
                    joined[expected.pop(pid)] = connection
                else:  # an unknown process
                    connection.close()
        except BaseException as error:
            for each in joined.values():
                each.close()
            if isinstance(error, TimeoutError):
                late = ", ".join(map(str, sorted(expected.values())))
                raise PeerMissing(f"ranks {late} of this machine have not connected to this one") from None
            raise
        finally:
            self.close()
        return LocalSockets(joined, timeout_s)

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()


def _address(process: RankProcess) -> str:
    return f"\0runner/{process.pid}/{process.started}"


def _connect(process: RankProcess) -> socket.socket:
    """Return a connection to a rank that listens. Raise PeerMissing if its process has exited."""
    connection = _new()
    try:
        connection.connect(_address(process))
        if _process_of(connection) != process.pid:
            raise ConnectionError("another process listens at its address")
    except OSError as error:
        connection.close()
        raise PeerMissing(f"rank {process.rank} of this machine does not respond ({error})") from None
    return connection


def _new() -> socket.socket:
    # Unlike a stream, SOCK_SEQPACKET keeps messages apart: one system call sends or receives one message.
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def _process_of(connection: socket.socket) -> int | None:
    """Return the pid at the other end; None if another user runs it."""
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, user, _ = _CREDENTIALS.unpack(data)
    return pid if user == os.geteuid() else None


def _close_in_child() -> None:
    """Close the connections in a forked loader worker: it would keep them open after its rank has died."""
    for each in _open:
        each.close()


os.register_at_fork(after_in_child=_close_in_child)
