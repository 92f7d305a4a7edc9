"""torchrun's elastic agent, run by the runner itself: on this machine, or as one of several."""

import logging
import math
import socket
import sys
import threading
import uuid
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousConnectionError, RendezvousError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from runner.config.schema import Config
from runner.distributed.environment import RankInfo, find_rank_info
from runner.distributed.hung_rank import ENDED
from runner.distributed.network import address_towards, is_loopback
from runner.distributed.parent import end_at_once_with_parent
from runner.errors import InputError
from runner.launchers.elastic_agent import counting_from_checkpoints
from runner.launchers.env import checked_timeout
from runner.launchers.meeting import BACKEND, DEAD_NODE_S, ending_when_lost
from runner.launchers.rank_process import (
    TOLD,
    Outcome,
    begin_rank,
    passing_signals_on,
    run_rank,
    start_fork_server,
)
from runner.launchers.restarts import Told, how_it_died
from runner.launchers.start_again import run_again_while_it_gets_on, told_directory
from runner.runs.run_directory import Request

LAST_CALL_S = 30  # that enough nodes wait for still more
HANDLED_BY_AGENT = "SIGXCPU"  # torch wants one at least, and ends everything at it


class Torchrun:
    """launcher=torchrun: an agent that starts nproc_per_node processes, and the world again when one dies.

    nodes: how many agents there are, each started by this same command; min:max where the world may lose and gain some.
    rdzv_endpoint: HOST:PORT of the rendezvous, on one of the nodes.
    """

    starts_processes = True
    queues = False

    def __init__(
        self,
        nproc_per_node: int = 2,
        nodes: int | str = 1,
        rdzv_endpoint: str | None = None,
        rdzv_id: str = "runner",
        max_restarts: int = 0,
        join_timeout_s: float = 120.0,
    ):
        if nproc_per_node < 1:
            raise ValueError(f"launcher.nproc_per_node={nproc_per_node} must be at least 1; try 2")
        if max_restarts < 0:
            raise ValueError(f"launcher.max_restarts={max_restarts} must be at least 0")
        self.min_nodes, self.max_nodes = _bounds(nodes)
        if self.max_nodes > 1 and not rdzv_endpoint:
            raise ValueError(f"launcher.nodes={nodes} needs launcher.rdzv_endpoint=HOST:PORT, their rendezvous")
        if self.max_nodes == 1 and rdzv_endpoint:
            raise ValueError(
                f"launcher.rdzv_endpoint={rdzv_endpoint} has an effect on several nodes; add launcher.nodes"
            )
        self.started_on_each = self.max_nodes > 1
        host, _, port = (rdzv_endpoint or "localhost:0").rpartition(":")
        if not host or not port.isdigit():
            raise ValueError(f"launcher.rdzv_endpoint={rdzv_endpoint} must be HOST:PORT, as node1:29400")
        self.host, self.port, self.rdzv_id = host.strip("[]"), int(port), rdzv_id
        self.nproc_per_node, self.max_restarts = nproc_per_node, max_restarts
        self.world_size = self.max_nodes * nproc_per_node if self.max_nodes == self.min_nodes else None
        self.join_timeout_s = checked_timeout(join_timeout_s)

    def launch(self, config: Config, request: Request, rank_info: RankInfo) -> dict[str, float]:
        logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # the runner tells, and once
        start_fork_server("runner.launchers.torchrun")
        restarts = self.max_restarts if self.max_nodes == 1 else 0  # agents of several nodes meet again by themselves
        with passing_signals_on(is_guest=rank_info.is_guest) as received:
            return run_again_while_it_gets_on(
                lambda request: self._run_agent(config, request, rank_info, received), request, restarts, received
            )

    def _run_agent(
        self, config: Config, request: Request, rank_info: RankInfo, received: Sequence[str]
    ) -> tuple[Outcome | None, str | None]:
        """This node's agent, to its end. Returns what its first rank said, and which rank died of what."""
        alone = self.max_nodes == 1
        launch_config = LaunchConfig(
            min_nodes=self.min_nodes,
            max_nodes=self.max_nodes,
            nproc_per_node=self.nproc_per_node,
            run_id=uuid.uuid4().hex if alone else self.rdzv_id,
            rdzv_backend=BACKEND,
            rdzv_endpoint=f"{self.host}:{self.port}",
            rdzv_configs={
                "join_timeout": math.ceil(self._meeting_s()),
                "read_timeout": math.ceil(self.join_timeout_s),
                "last_call_timeout": math.ceil(self._last_call_s()),
                # torch finds it out by this machine's own name, which need not resolve.
                "is_host": alone or self._hosts_rendezvous(),
            },
            max_restarts=0 if alone else self.max_restarts,
            monitor_interval=0.05,
            start_method="forkserver",
            local_addr="localhost" if alone else self._own_address(),
            signals_to_handle=HANDLED_BY_AGENT,  # those that matter are passed on, so that the ranks save
        )
        outcomes: dict[int, Outcome] = {}
        died, had_ranks, told = None, threading.Event(), Told(partial(told_directory, request))
        try:
            lost = ending_when_lost(
                self.host, self.port, self._meeting_s(), had_ranks, lambda answers: self._lost(request, answers)
            )
            with nullcontext() if rank_info.is_guest else lost, counting_from_checkpoints(told, lambda: bool(received)):
                outcomes = elastic_launch(launch_config, _run_rank)(config, request, self.join_timeout_s, not alone)
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            why = told.failure()
            if failure.exitcode == TOLD or ENDED in why:  # who was ended is not the cause
                outcomes = {rank: {"failed": why or "a rank has told why"}}
            else:
                died = how_it_died(rank, failure.exitcode)
        except RendezvousError as error:
            why = str(error) or type(error).__name__
            if isinstance(error, RendezvousConnectionError) and had_ranks.is_set():
                died = self._lost(request)
            elif isinstance(error, RendezvousClosedError) and had_ranks.is_set():
                died = f"{self._where}: another node has given up, and says why{_go_on(request)}"
            elif had_ranks.is_set():
                died = f"{self._where}: the nodes found each other no more ({why}){_go_on(request)}"
            else:
                raise InputError(
                    f"{self._where}: {self.min_nodes} nodes did not find each other there within "
                    f"launcher.join_timeout_s={self.join_timeout_s:g} ({why}); is every one started?"
                ) from None
        return next(iter(outcomes.values()), None), died

    @property
    def _where(self) -> str:
        return f"launcher.rdzv_endpoint={self.host}:{self.port}"

    def _lost(self, request: Request, answers: bool = False) -> str:
        if answers:
            return f"{self._where}: the other nodes neither met this one again nor ended{_go_on(request)}"
        return f"{self._where}, where the nodes meet, is lost: nothing answers there{_go_on(request)}"

    def _last_call_s(self) -> float:
        return min(LAST_CALL_S, self.join_timeout_s)

    def _meeting_s(self) -> float:
        return self.join_timeout_s + (self._last_call_s() + DEAD_NODE_S if self.max_nodes > self.min_nodes else 0)

    def _own_address(self) -> str:
        """By which the other nodes reach this one."""
        own = address_towards(self.host, "launcher.rdzv_endpoint")
        return self.host if is_loopback(own) else own  # where it is this one's name, the others resolve it

    def _hosts_rendezvous(self) -> bool:
        """Whether the endpoint is on this machine, and no other agent of it serves there already."""
        try:
            there = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)[0]
            # A machine's own name is an alias of its loopback on Debian.
            if not is_loopback(str(there[4][0])) and there[4][0] != address_towards(self.host):
                return False
            with socket.socket(there[0], there[1]) as probe:
                return probe.connect_ex(there[4]) != 0
        except OSError:
            return False  # meeting there will tell


def _run_rank(config: Config, request: Request, join_timeout_s: float, nodes_change: bool) -> Outcome:
    """One rank's process; the agent has put into its environment which one.

    nodes_change: each of several agents counts the restarts that it has seen, and the ranks' store is of one start.
    """
    begin_rank()
    rank_info = find_rank_info()
    if nodes_change:
        rank_info = replace(rank_info, restart=0, memory=f"{request.tells}-memory")
    outcome, leave = run_rank(config, request, rank_info, join_timeout_s)
    leave()
    if "failed" in outcome:
        sys.exit(TOLD)  # a rank that returns has succeeded, for an agent: it would wait for those of other nodes
    end_at_once_with_parent()  # torch has it wait until its agent has read what it returns
    return outcome


def _go_on(request: Request) -> str:
    """What continues the run, where it had begun."""
    directory = told_directory(request)
    return f"; start every node again with resume={directory}" if directory else ""


def _bounds(nodes: Any) -> tuple[int, int]:
    first, _, last = str(nodes).partition(":")
    if not first.isdigit() or not (last or first).isdigit() or not 1 <= int(first) <= int(last or first):
        raise ValueError(f"launcher.nodes={nodes} must be a number of at least 1, or MIN:MAX, as 2 or 1:4")
    return int(first), int(last or first)
