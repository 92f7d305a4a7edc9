"""One rank's view of its world: its identity and devices, and everything that it does together with the other ranks."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from runner.distributed.backend import Backend
from runner.distributed.collectives import Collectives
from runner.distributed.environment import RankInfo
from runner.distributed.failures.heartbeat import Heartbeat
from runner.distributed.failures.peer_failure import PeerMissing
from runner.distributed.failures.shutdown import Shutdown
from runner.distributed.failures.watchdog import Watchdog
from runner.distributed.local.local_ranks import LocalRanks
from runner.distributed.membership import Membership, StoreLost
from runner.distributed.process_group import ProcessGroup
from runner.distributed.readings import Readings
from runner.distributed.store_consensus import StoreConsensus
from runner.distributed.world_store import WorldStore
from runner.process.daemon_thread import call_in_daemon


class World:
    """The world of this process, which joins it once. Each job of a sweep forms its own process group."""

    def __init__(self, rank_info: RankInfo, connection: dist.Store | None, backend: Backend):
        self.backend, self._connection = backend, connection
        self.heartbeat = Heartbeat(rank_info.rank)
        self.membership: Membership | None = None  # None if this world cannot continue without one of its ranks
        self._enter(rank_info)

    def _enter(self, rank_info: RankInfo) -> None:
        """Become a rank of a world."""
        self.rank_info, backend = rank_info, self.backend
        self.rank, self.world_size = rank_info.rank, rank_info.world_size
        self.heartbeat.renumber(rank_info.rank)
        self.devices = [torch.device("cpu")]  # all devices that belong to this rank
        self.store = WorldStore(rank_info, self._connection)
        if self.membership is not None:
            self.store.check_peers = self._check_peers
        self.local_ranks = LocalRanks(rank_info, self.store, self.heartbeat)
        self.store.timeout_s = backend.timeout_s
        self.consensus = StoreConsensus(rank_info, self.store, backend.timeout_s)
        self.group = ProcessGroup(rank_info, self.store, self.local_ranks)
        self.collectives = Collectives(rank_info.world_size)
        self.readings = Readings()
        self.shutdown = Shutdown(rank_info, self.store, self.local_ranks, self.heartbeat)
        self.watchdog = Watchdog(rank_info, self.store, self.local_ranks, self.heartbeat, self.shutdown)

    def be_elastic(self) -> None:
        """Let the ranks continue in another world if one of them is lost, or another process waits to join."""
        if self.membership is None and self._connection is not None:
            self.membership = Membership(self._connection, self.heartbeat.start(), self.backend.timeout_s)
            self.store.check_peers = self._check_peers
            call_in_daemon(self.membership.beat, "beat")

    def join_later(self, check: Callable[[Any], None]) -> None:
        """Wait for a world that includes this process, which was not one of the first ranks. Raise as Membership.

        check: Raises Refused, given the facts of the first world's rank 0, if this process must not join.
        """
        self.be_elastic()
        assert self.membership is not None
        check(self.membership.first_facts())
        self._enter(self.membership.join(self.rank_info))

    def regroup(self, has_failed: Callable[[], str | None]) -> None:
        """Leave this world, and form the next one with the ranks that are left. Raises as `Membership.form_next`.

        The process group of this world must have been left. Raises StoreLost if the store does not respond.
        """
        assert self.membership is not None
        try:
            self._enter(self.membership.form_next(self.rank_info, has_failed, self.shutdown.stacks_dir))
        except RuntimeError as error:
            where = f"{self.rank_info.master_addr}:{self.rank_info.master_port}"
            raise StoreLost(f"the ranks' store at {where} does not respond ({str(error).splitlines()[0]})") from None

    def _check_peers(self) -> None:
        assert self.membership is not None
        if lost := self.membership.lost():
            raise PeerMissing(f"rank {lost[0].rank} on {lost[0].host} was lost")

    @property
    def device(self) -> torch.device:
        """The device of the samples."""
        return self.devices[0]

    def begin_job(self, backend: Backend) -> None:
        """Start a job, with new keys in the store. All ranks must call it."""
        self.backend, self.consensus.timeout_s, self.store.timeout_s = backend, backend.timeout_s, backend.timeout_s
        self.readings = Readings()  # a failed job may have left some
        self.store.begin_job()
        self.local_ranks.publish()
        self.shutdown.begin_job(backend.timeout_s)
