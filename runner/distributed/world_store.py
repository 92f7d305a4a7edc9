"""The keys of a world in its store: the keys of each job, and keys that outlast a restart of all ranks."""

import os
import socket
import stat
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist

from runner.distributed.environment import RankInfo
from runner.distributed.failures.signals import received, seconds_since_received
from runner.errors import Preempted
from runner.process.daemon_thread import call_in_daemon

T = TypeVar("T")
RESPONSE_S = 5.0  # for the store to respond
STOP_GRACE_S = 5.0  # for which a rank still waits for the others after a signal
STOPPED = "stopped"  # the key of the reason why a rank stops, for the ranks that wait for it


class RanksMissing(TimeoutError):
    """Ranks did not reach a point of consensus in time. is_reporter: this rank reports the failure for all ranks."""

    def __init__(self, text: str, is_reporter: bool):
        super().__init__(text)
        self.is_reporter = is_reporter


class WorldStore:
    """The store of a world: the keys of the whole world, and of the current job; None in a world of one rank.

    Keys of a job begin with `agreed/` for StoreConsensus, `gathered/` for `publish`, `namespace/` for `namespace`; the
    others belong to Shutdown and FirstFailure.

    Attributes:
        timeout_s: For the ranks to publish a text.
        check_peers: Called during each wait for other ranks; raises PeerMissing if a rank of an elastic world was lost.
    """

    def __init__(self, rank_info: RankInfo, connection: dist.Store | None):
        """connection: to the store of the ranks' rendezvous; None in a world of one rank."""
        self._rank_info, self._connection = rank_info, connection
        # A restarted world must not read keys that the one before it left in an agent's store (pytorch issue 135712).
        self.root = None if connection is None else dist.PrefixStore(f"attempt{rank_info.restart}", connection)
        self.job: dist.Store | None = self.root  # both are None as well if the store does not respond
        self.timeout_s = 0.0
        self.check_peers: Callable[[], None] | None = None
        self._num_jobs = 0

    def begin_job(self) -> None:
        """Use new keys for the next job. All ranks must call it."""
        if self.root is not None:
            self.job = dist.PrefixStore(f"job{self._num_jobs}", self.root)
        self._num_jobs += 1

    def namespace(self, name: str) -> dist.Store:
        """Return a store of this job's keys under `name`."""
        return dist.HashStore() if self.job is None else dist.PrefixStore(f"namespace/{name}", self.job)

    def publish(self, topic: str, text: str) -> None:
        """Write this rank's text of the topic, once per job."""
        if self.job is not None:
            self.job.set(f"gathered/{topic}/{self._rank_info.rank}", text)

    def published(self, topic: str) -> list[str]:
        """Return the texts of all ranks, by rank, once all have called `publish`; [] in a world of one rank.

        Raises RanksMissing if they do not in time, and Preempted as `wait_for`.
        """
        if (store := self.job) is None:
            return []
        keys = [f"gathered/{topic}/{rank}" for rank in range(self._rank_info.world_size)]
        if not self.wait_for(keys, time.monotonic() + self.timeout_s):
            missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
            raise self.ranks_missing(missing, f"did not respond ({topic})", self.timeout_s)
        return [text.decode() for text in store.multi_get(keys)]

    def gather(self, topic: str, text: str) -> list[str]:
        """Return the texts of all ranks, by rank. All ranks must call it, once per topic and job."""
        self.publish(topic, text)
        return self.published(topic) or [text]

    def wait_for(self, keys: Sequence[str], deadline: float) -> bool:
        """Return True if all keys of the job are set in time.

        Raises Preempted if a rank was stopped, which sets no more keys, and STOP_GRACE_S after a signal to this rank:
        a launcher also signals the ranks that wait for one that has exited. store.wait would handle no signal.
        Raises what `check_peers` raises.
        """
        store, start, pause_s = self.job, time.monotonic(), 0.001
        assert store is not None
        while not (found := store.check(list(keys))) and time.monotonic() < deadline:
            if self.check_peers is not None:
                self.check_peers()
            if reason := self.stop_reason():
                raise Preempted(reason)
            if reason := signaled_since(start):
                self.announce_stop(reason)
                raise Preempted(reason)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.02)
        return found

    def ranks_missing(self, ranks: Sequence[int], what: str, timeout_s: float) -> RanksMissing:
        """Return the error about ranks that were too late. The first rank that notices reports it."""
        assert self.job is not None
        own, size = str(self._rank_info.rank), self._rank_info.world_size
        is_reporter = self.job.compare_set("absent", "", own).decode() == own
        text = f"{name_ranks(ranks)} of {size} {what} within backend.timeout_s={timeout_s:g} s"
        return RanksMissing(text, is_reporter)

    def restart_file(self) -> Path | None:
        """Return the JSON file in which this machine's agent keeps texts for restarted ranks; None if there is none."""
        path = self._rank_info.restart_file
        return None if path is None else Path(f"{path}-{self._num_jobs}")

    def is_reachable(self) -> bool:
        """Return True if a process listens at the store's address. Without this check, torch would log thirty lines."""
        store = getattr(self._connection, "underlying_store", self._connection)
        if not isinstance(store, dist.TCPStore):
            return store is not None
        try:
            socket.create_connection((store.host, store.port), timeout=RESPONSE_S).close()
        except OSError:
            return False
        return True

    def call(self, function: Callable[[dist.Store], T], timeout_s: float = RESPONSE_S) -> T | None:
        """Return `function(job)`. If the store does not respond, disconnect and return None."""
        root, job = self.root, self.job
        if root is None or job is None:
            return None
        with suppress(RuntimeError, TimeoutError):
            if self.is_reachable():
                # The system accepts connections even for a process that SIGSTOP has stopped.
                call_in_daemon(lambda: root.check([STOPPED]), "store").result(RESPONSE_S)
                return call_in_daemon(lambda: function(job), "store").result(timeout_s)
        self.disconnect()
        return None

    def announce_stop(self, reason: str) -> None:
        """Let the ranks that wait for this one know that it stops."""
        if (root := self.root) is not None:
            self.call(lambda _: root.set(STOPPED, reason))

    def stop_reason(self) -> str | None:
        """Return the reason of the last rank that announced its stop; None if none has."""
        return self.root.get(STOPPED).decode() if self.root is not None and self.root.check([STOPPED]) else None

    def disconnect(self) -> None:
        self._connection = self.root = self.job = None


def name_ranks(ranks: Sequence[int]) -> str:
    """Return "rank 3" or "ranks 3, 5"."""
    return f"rank{'' if len(ranks) == 1 else 's'} {', '.join(map(str, ranks))}"


def signaled_since(start: float) -> str | None:
    """Return the signal if both it and `start`, when a wait began, are more than STOP_GRACE_S ago; otherwise None."""
    is_over = min(seconds_since_received(), time.monotonic() - start) > STOP_GRACE_S
    return received() if is_over else None


def set_tcp_timeouts(store: dist.Store | None, timeout_s: float) -> None:
    """Set TCP keepalive and user timeout on the store's sockets, so that an unreachable machine is detected in time.

    A machine that loses its network or its power closes no connection. TCP would retransmit for a quarter of an hour
    (tcp_retries2), and keep an idle connection forever. Linux only.
    """
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    if not isinstance(store, dist.TCPStore) or not hasattr(socket, "TCP_USER_TIMEOUT"):
        return
    descriptors: list[str] = []
    with suppress(OSError):  # some containers have no /proc
        descriptors = os.listdir("/proc/self/fd")
    for descriptor in map(int, descriptors):
        with suppress(OSError):  # closed by now, or not connected
            if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                continue
            with socket.socket(fileno=os.dup(descriptor)) as connection:
                if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.getpeername()[1] == store.port:
                    interval_s = max(1, round(timeout_s / 4))
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, interval_s)
                    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, interval_s)
                    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(1000 * timeout_s))
