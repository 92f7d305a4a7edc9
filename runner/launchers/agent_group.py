"""The agents of one run on several machines: they are started, replaced if their machine is lost, and stopped."""

import math
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from runner.distributed.failures.signals import PREEMPTED, handling_signals, received
from runner.launchers.machines import Agent

POLL_S = 0.2
RETRY_S = 2.0  # between two attempts to start the agent of a lost machine again
STEADY_S = 30.0  # after which an agent that was started again counts as running
FAILED_S = 30.0  # for the other agents to end by themselves after one has failed
SAVE_S = 40.0  # for the ranks to save and exit after a signal
EARLY_S = 10.0  # by which the exit of ranks that have saved may be noticed before the loss because of which they saved


@dataclass
class _Node:
    name: str
    agent: Agent
    started_at: float
    status: int | None = None  # once the agent has ended
    ended_at: float = math.inf
    is_lost: bool = False
    num_losses: int = 0
    lost_at: float | None = None  # while its machine is lost


class AgentGroup:
    """The agents of the machines `names`.

    start: starts the agent of the machine with this number. why_lost: returns why the machine is lost, given the number
    and the exit status; None if the agent has ended by itself. The run continues without a lost machine if `min_nodes`
    are left; otherwise its agent is started again for `join_timeout_s` seconds, at most `max_restarts` times. If that
    fails, the others are stopped at once.

    end_s: seconds after a loss until the ranks of the lost agent have ended. For so long they may own the lock of the
    run, so that the agent of the only machine is not started again before; among several machines, the next world takes
    the lock over.

    is_elastic: the ranks of any others continue in place, and those of an agent that is started again join them after
    `end_s`, so that the earlier ranks there do not join as well. host: the number of the machine that must stay.
    """

    def __init__(
        self,
        names: Sequence[str],
        start: Callable[[int], Agent],
        why_lost: Callable[[int, int], str | None],
        min_nodes: int,
        max_restarts: int,
        join_timeout_s: float,
        end_s: float = 0.0,
        is_elastic: bool = False,
        host: int | None = None,
    ):
        self._names, self._start, self._why_lost = names, start, why_lost
        self._min_nodes, self._max_restarts, self._join_timeout_s = min_nodes, max_restarts, join_timeout_s
        self._is_elastic, self._host = is_elastic, host
        self._end_s, self._wait_s = end_s, end_s if len(names) == 1 or is_elastic else 0.0
        self._nodes: list[_Node] = []
        self._stopped_at: float | None = None
        self._losses: list[float] = []  # when an agent was lost
        self._loss = ""  # the last one
        self.lost = ""  # why the run cannot continue
        self.signal: str | None = None  # the first one that this process has received

    def run(self, on_poll: Callable[[], None]) -> dict[int, int]:
        """Run the agents to their end. Return their exit statuses by number, without lost machines, the earliest first.

        on_poll: called several times a second. After a signal to this process, the agents save and exit.
        """
        with handling_signals():
            try:
                for number, name in enumerate(self._names):
                    self._nodes.append(_Node(name, self._start(number), time.monotonic()))
                while any(node.status is None for node in self._nodes):
                    for number, node in enumerate(self._nodes):
                        self._watch(number, node)
                    self.signal = received()
                    if self.signal or self._has_failed():
                        self._stop()
                    if self._stopped_at is not None and time.monotonic() - self._stopped_at > SAVE_S:
                        break
                    on_poll()
                    time.sleep(POLL_S)
            finally:
                for node in self._nodes:
                    node.agent.close()
                    node.agent.kill()
        if self.is_interrupted and self.num_losses > self._max_restarts:
            self.lost = self._loss
        ended = [(node.ended_at, number, node.status) for number, node in enumerate(self._nodes) if not node.is_lost]
        return {number: status for _, number, status in sorted(ended) if status is not None}

    @property
    def num_losses(self) -> int:
        """The number of times that one agent was lost: the one that was lost most often."""
        return max(node.num_losses for node in self._nodes)

    @property
    def is_interrupted(self) -> bool:
        """True if all ranks have saved and exited, because one agent has lost its connection to this process.

        Only the times show the cause. So this is also true if the ranks were stopped on purpose within `end_s` seconds
        after a loss, or EARLY_S seconds before it.
        """
        ended_at = min((node.ended_at for node in self._nodes if node.status == PREEMPTED), default=math.inf)
        by_itself = self._stopped_at is None or ended_at < self._stopped_at
        are_near = any(-EARLY_S <= ended_at - lost_at <= self._end_s for lost_at in self._losses)
        return by_itself and are_near and not (self.lost or self.signal)

    def _watch(self, number: int, node: _Node) -> None:
        """Record the end of an agent. If its machine is lost, start it again, leave it out, or stop the others."""
        status, now = node.agent.status, time.monotonic()
        if node.status is not None:
            return
        if status is None:
            if now - node.started_at > STEADY_S:
                node.lost_at = None
            return
        why = self._why_lost(number, status)
        if why is None or self._stopped_at is not None:
            node.status, node.is_lost, node.ended_at = status, why is not None, now
            return
        if node.lost_at is None:
            self._loss = f"{node.name} is lost: {why}"
            print(self._loss, file=sys.stderr, flush=True)
            node.num_losses, node.lost_at = node.num_losses + 1, now
            self._losses.append(now)
        retry_at = node.lost_at + self._wait_s
        is_hopeless = node.num_losses > self._max_restarts or now > retry_at + self._join_timeout_s
        others = [other for other in self._nodes if other is not node and not other.is_lost]
        can_continue = len(others) >= self._min_nodes
        if self._is_elastic:
            can_continue = is_hopeless and bool(others) and number != self._host
        if can_continue or any(other.status == 0 for other in others):  # or the run is finished
            node.status, node.is_lost = status, True
        elif is_hopeless:
            node.status, node.is_lost, self.lost = status, True, f"{node.name} is lost: {why}"
            self._stop()
        elif now > retry_at and now - node.started_at > RETRY_S:
            node.agent.close()
            node.agent, node.started_at = self._start(number), now

    def _has_failed(self) -> bool:
        """Return True if an agent has failed a while ago, perhaps before it joined the others, which wait for it.

        Also if the ranks have saved, and only agents that were started again are left, which wait for others.
        """
        if self.is_interrupted and all(node.lost_at is not None for node in self._nodes if node.status is None):
            return True
        failed = [
            node.ended_at
            for node in self._nodes
            # The others of an elastic run may have refused an agent that was started again.
            if node.status and not node.is_lost and not (self._is_elastic and node.num_losses)
        ]
        return time.monotonic() - min(failed, default=math.inf) > FAILED_S

    def _stop(self) -> None:
        if self._stopped_at is None:
            self._stopped_at = time.monotonic()
            for node in self._nodes:
                if node.status is None:
                    node.agent.send_signal(signal.SIGTERM)
