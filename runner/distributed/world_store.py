"""The keys of a world in its store: those of one job after another, and those that outlast a restart of all ranks."""

import socket

import torch.distributed as dist

from runner.distributed.environment import RankInfo


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
            self.job.set(f"host/{self._rank_info.rank}", socket.gethostname())
        self._num_jobs += 1

    def topic(self, name: str) -> dist.Store:
        """This job's keys of one topic."""
        return dist.HashStore() if self.job is None else dist.PrefixStore(name, self.job)

    def kept(self) -> dist.Store | None:
        """This job's keys that a world reads which its agent has started again."""
        return None if self._connection is None else dist.PrefixStore(f"kept/job{self._num_jobs}", self._connection)

    def drop(self) -> None:
        """Let go of the connection."""
        self._connection = self.root = self.job = None
