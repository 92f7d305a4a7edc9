"""The keys of a world in its store: those of one job after another, and those that outlast a restart of all ranks."""

import json
import socket
from pathlib import Path

import torch.distributed as dist

from runner.distributed.environment import RankInfo

ANSWER_S = 5.0  # for a connection to the store


class WorldStore:
    """`connection` is to the store of the ranks' rendezvous; None in a world of one.

    root: the keys of the world as a whole. job: those of the job that it is at.
    """

    def __init__(self, rank_info: RankInfo, connection: dist.Store | None):
        self._rank_info, self._connection = rank_info, connection
        # A restarted world must not read what the one before it left in an agent's store (pytorch issue 135712).
        self.root = None if connection is None else dist.PrefixStore(f"attempt{rank_info.restart}", connection)
        self.job: dist.Store | None = self.root
        self._num_jobs = 0

    def begin_job(self) -> None:
        """Give the next job keys of its own. All ranks must call it."""
        if self.root is not None:
            self.job = dist.PrefixStore(f"job{self._num_jobs}", self.root)
        self._num_jobs += 1

    def topic(self, name: str) -> dist.Store:
        """This job's keys of one topic."""
        return dist.HashStore() if self.job is None else dist.PrefixStore(name, self.job)

    def kept(self) -> dist.Store | None:
        """This job's keys that a world reads which its agent has started again."""
        return None if self._connection is None else dist.PrefixStore(f"kept/job{self._num_jobs}", self._connection)

    def memory(self) -> "Memory | None":
        """What this node's agent keeps of this job, in the place of `kept`: it outlasts the loss of any other node."""
        return None if self._rank_info.memory is None else Memory(Path(f"{self._rank_info.memory}-{self._num_jobs}"))

    def answers(self) -> bool:
        """Whether somebody listens where the store is: one that has gone is told by torch in thirty lines."""
        if not isinstance(self._connection, dist.TCPStore):
            return self._connection is not None
        try:
            socket.create_connection((self._connection.host, self._connection.port), timeout=ANSWER_S).close()
        except OSError:
            return False
        return True

    def drop(self) -> None:
        """Let go of the connection."""
        self._connection = self.root = self.job = None


class Memory:
    """A file with a text by topic, which one rank of the machine writes."""

    def __init__(self, path: Path):
        self._path = path

    def read(self) -> dict[str, str]:
        return json.loads(self._path.read_text()) if self._path.exists() else {}

    def keep(self, topic: str, text: str) -> None:
        partial = self._path.with_name(f"{self._path.name}.tmp")
        partial.write_text(json.dumps(self.read() | {topic: text}))
        partial.replace(self._path)
