"""torch's elastic agent, whose restarts are counted as everywhere: from each new checkpoint, and no failure twice."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler
from torch.distributed.launcher import api

from runner.distributed.hung_rank import ENDED
from runner.distributed.signals import SAVED
from runner.launchers.restarts import Restarts, Told, how_it_died, newest_step

ENDLESS = 1_000_000  # restarts, which torch would count down over the whole run


class Agent(LocalElasticAgent):
    """One node's agent. is_stopping: whether a signal has asked for an end.

    Each counts the failures of its own ranks, and the first to give up closes the rendezvous for all.
    """

    def __init__(self, told: Told, is_stopping: Callable[[], bool], spec: Any, **options: Any):
        self._restarts = Restarts(spec.max_restarts)
        self._told, self._is_stopping, self._began_at = told, is_stopping, 0
        spec.max_restarts = min(spec.max_restarts, 1) * ENDLESS
        super().__init__(spec, **options)

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        # Once all have met, the ranks of another node may be at a checkpoint before this one's have begun.
        self._began_at = newest_step(self._told.directory())
        super()._rendezvous(worker_group)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._told.begin()
        handler = worker_group.spec.rdzv_handler
        if worker_group.spec.max_restarts and isinstance(handler, DynamicRendezvousHandler):
            # Ranks tell starts apart by this number: torch's own is each agent's, who may have come to lose none.
            self._remaining_restarts = worker_group.spec.max_restarts - handler._state_holder.state.round
        return super()._start_workers(worker_group)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result = super()._monitor_workers(worker_group)
        has_failed = result.state in (WorkerState.FAILED, WorkerState.UNHEALTHY)
        if has_failed and self._remaining_restarts and not self._goes_on(result, worker_group.group_rank == 0):
            self._remaining_restarts = 0
        return result

    def _goes_on(self, result: RunResult, is_first: bool) -> bool:
        """Whether the world is started again after this."""
        failure, was_killed = self._told.failure(), False
        if result.failures:
            rank, first = ChildFailedError("", result.failures).get_first_failure()
            if self._is_stopping() or first.exitcode == SAVED:
                return False
            was_killed = not failure or (first.exitcode < 0 and ENDED not in failure)  # whom others ended is no cause
            failure = how_it_died(rank, first.exitcode) if was_killed else failure
        began_at, directory = self._began_at, self._told.directory()
        return self._restarts.refused(failure or result.state.name, began_at, directory, was_killed or is_first) is None


@contextmanager
def counting_from_checkpoints(told: Told, is_stopping: Callable[[], bool] = lambda: False) -> Iterator[None]:
    """Meanwhile what torch launches has such an agent; torch itself has no parameter for that."""

    def make(spec: Any, **options: Any) -> Agent:
        return Agent(told, is_stopping, spec, **options)

    name = LocalElasticAgent.__name__
    before = getattr(api, name)
    setattr(api, name, make)
    try:
        yield
    finally:
        setattr(api, name, before)
