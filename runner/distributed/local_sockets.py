"""Sockets between the ranks of one machine, one for each two of them, and the messages that go through them.

Of Linux's abstract namespace: nothing is in the file system, no other machine reaches them, and the system says of each
connection which process has made it.
"""

import contextlib
import os
import socket
import struct
import sys
import time
import weakref
from collections.abc import Callable, Mapping

from runner.distributed.peer_failure import PeerMissing
from runner.distributed.rank_trace import RankProcess, state_of

LARGEST = 65_536  # bytes of a message; one that is sent must fit into what the system keeps until it is read
JOIN_S = 60.0  # until all are connected: a rank that could not is waited for
TICK_S = 0.5  # a wait looks so often whether it is over
Tag = tuple[int, int]  # of a group of ranks, and of what it exchanges: how many exchanges it has begun before
_HEADER = struct.Struct("=QQ")
_FILE = struct.Struct("@i")
_CREDENTIALS = struct.Struct("=iII")  # process, user, group
_TIME = struct.Struct("@ll")  # seconds, microseconds
_open: "weakref.WeakSet[LocalSockets]" = weakref.WeakSet()


class LocalSockets:
    """This rank's, by the rank at their other end. For one thread at a time, whichever.

    Each send and receive raises PeerMissing where the other rank has gone, or is not ready by the deadline. Then all
    are shut: whoever waits for this rank finds that out at once.
    """

    def __init__(self, sockets: Mapping[int, socket.socket], timeout_s: float):
        self._sockets, self._timeout_s = dict(sockets), timeout_s
        self._buffer = bytearray(_HEADER.size + LARGEST)
        self._early: dict[tuple[int, Tag], bytearray] = {}  # what has come before it was asked for
        for each in self._sockets.values():
            each.setblocking(True)
            # In the socket itself: Python's own time-out costs a call more each time.
            for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
                each.setsockopt(socket.SOL_SOCKET, option, _TIME.pack(*divmod(int(TICK_S * 1e6), 1_000_000)))
        _open.add(self)

    @property
    def ranks(self) -> list[int]:
        return sorted(self._sockets)

    def deadline(self) -> float:
        """Until when the others may take for what begins now, on the monotonic clock."""
        return time.monotonic() + self._timeout_s

    def send(
        self, rank: int, tag: Tag, data: bytes | bytearray | memoryview, deadline: float, file: int | None = None
    ) -> None:
        """Of at most LARGEST bytes, and a file that is open here. It returns before they are read."""
        files = [] if file is None else [(socket.SOL_SOCKET, socket.SCM_RIGHTS, _FILE.pack(file))]
        while True:
            try:
                self._sockets[rank].sendmsg([_HEADER.pack(*tag), data], files)
                return
            except BlockingIOError:
                self._wait_on(rank, "has read", deadline)
            except ConnectionError:
                raise self._lost(rank) from None
            except OSError:
                self.shut()
                raise

    def receive(self, rank: int, tag: Tag, deadline: float) -> bytearray:
        """What the rank has sent, or will send, under the tag."""
        return self._receive(rank, tag, deadline, lambda connection: connection.recv_into(self._buffer))

    def receive_file(self, rank: int, tag: Tag, deadline: float) -> int | None:
        """The file that has come with what the rank sends under the tag: who receives it has to close it.

        All that the rank sends must be received in the order in which it is sent, up to this.
        """
        found: list[int] = []

        def read(connection: socket.socket) -> int:
            size, ancillary, *_ = connection.recvmsg_into([self._buffer], socket.CMSG_SPACE(_FILE.size))
            found.extend(_FILE.unpack(data)[0] for level, kind, data in ancillary)
            return size

        self._receive(rank, tag, deadline, read)
        return found[0] if found else None

    def _receive(self, rank: int, tag: Tag, deadline: float, read: Callable[[socket.socket], int]) -> bytearray:
        """read: puts the next message of a connection into the buffer, and returns how many bytes it has."""
        while True:
            if self._early and (early := self._early.pop((rank, tag), None)) is not None:
                return early
            try:
                size = read(self._sockets[rank])
            except BlockingIOError:
                self._wait_on(rank, "has sent", deadline)
                continue
            except ConnectionError:  # with something unread
                size = 0
            except OSError:
                self.shut()
                raise
            if not size:
                raise self._lost(rank)
            found = _HEADER.unpack_from(self._buffer)
            data = self._buffer[_HEADER.size : size]
            if found == tag:
                return data
            self._early[rank, found] = data

    def shut(self) -> None:
        """Let whoever waits at the other ends, or here in another thread, wait no longer."""
        for each in self._sockets.values():
            with contextlib.suppress(OSError):  # the other end has gone
                each.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        for each in self._sockets.values():
            each.close()

    def _wait_on(self, rank: int, what: str, deadline: float) -> None:
        """Go on after a tick, unless it was the last one."""
        if time.monotonic() >= deadline:
            self.shut()
            raise PeerMissing(f"rank {rank} {what} nothing for {self._timeout_s:g} s")

    def _lost(self, rank: int) -> PeerMissing:
        self.shut()
        return PeerMissing(f"rank {rank} has closed its connection to this one")


class Listener:
    """Where this rank's process waits for those of the other ranks; closed by `close`, or once it has joined them.

    ready: whether it can. Elsewhere than on Linux it cannot, nor where the system does not say who connects.
    """

    def __init__(self, own: RankProcess):
        self._own, self._socket = own, None
        if sys.platform == "linux" and own.network:
            with contextlib.suppress(OSError):
                self._socket = _listen(own)

    @property
    def ready(self) -> bool:
        return self._socket is not None

    def reaches(self, process: RankProcess) -> bool:
        """Whether a process of this machine can connect to this one."""
        return (process.network, process.host) == (self._own.network, self._own.host)

    def join(self, others: Mapping[int, RankProcess], timeout_s: float) -> LocalSockets:
        """Connect to the lower ranks and await the others, when all of them listen. All of them must call it."""
        assert self._socket is not None
        joined: dict[int, socket.socket] = {}
        try:
            for rank in sorted(others):
                if rank < self._own.rank:
                    joined[rank] = _reach(others[rank])
            expected = {process.pid: rank for rank, process in others.items() if rank > self._own.rank}
            deadline = time.monotonic() + min(timeout_s, JOIN_S)
            while expected:
                self._socket.settimeout(TICK_S)
                try:
                    connection, _ = self._socket.accept()
                except TimeoutError:
                    late = sorted(expected.values())
                    if time.monotonic() > deadline or any(state_of(others[rank]) == "gone" for rank in late):
                        ranks = ", ".join(map(str, late))
                        raise PeerMissing(f"ranks {ranks} of this machine have not connected to this one") from None
                    continue
                if (pid := _process_of(connection)) in expected:
                    joined[expected.pop(pid)] = connection
                else:  # whoever that is
                    connection.close()
        except BaseException:
            for each in joined.values():
                each.close()
            raise
        finally:
            self.close()
        return LocalSockets(joined, timeout_s)

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()


def _address(process: RankProcess) -> str:
    return f"\0runner/{process.pid}/{process.started}"


def _listen(own: RankProcess) -> socket.socket:
    """Raises OSError where this system does not do what is needed, or the address is taken."""
    listener = _new()
    try:
        listener.bind(_address(own))
        listener.listen(4096)  # the system takes as many as it allows
        with _connect(own) as out, listener.accept()[0] as back:
            if _process_of(back) != own.pid or out.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) < 2 * LARGEST:
                raise OSError("the system names another process, or takes no messages of such a size")
    except OSError:
        listener.close()
        raise
    return listener


def _connect(process: RankProcess) -> socket.socket:
    """Raises OSError where another process has its address."""
    connection = _new()
    try:
        connection.connect(_address(process))
        if _process_of(connection) != process.pid:
            raise OSError(f"another process than that of rank {process.rank} listens at its address")
    except OSError:
        connection.close()
        raise
    return connection


def _reach(process: RankProcess) -> socket.socket:
    """As `_connect`, to a process that has been listening. Raises PeerMissing where it has ended."""
    try:
        return _connect(process)
    except ConnectionError as error:
        raise PeerMissing(f"rank {process.rank} of this machine does not answer ({error})") from None


def _new() -> socket.socket:
    # Other than a stream it keeps messages apart, so that one call to the system sends or receives one.
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def _process_of(connection: socket.socket) -> int | None:
    """That at the other end; None where another user runs it."""
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, user, _ = _CREDENTIALS.unpack(data)
    return pid if user == os.geteuid() else None


def _close_in_child() -> None:
    """A loader worker that is forked would hold the connections of a rank that has died."""
    for each in _open:
        each.close()


os.register_at_fork(after_in_child=_close_in_child)
