"""torchrun's elastic agent, run by the runner itself: on this machine, or as one of several."""

import logging
import math
import multiprocessing
import os
import socket
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from runner.config.schema import Config
from runner.distributed.environment import RankInfo, find_rank_info
from runner.distributed.network import address_towards, is_loopback
from runner.errors import InputError
from runner.launchers.env import checked_timeout
from runner.launchers.rank_process import (
    END_TIMEOUT_S,
    PRELOADED,
    Outcome,
    conclude,
    how_it_died,
    passing_signals_on,
    run_rank,
)
from runner.runs.run_directory import Request

LAST_CALL_S = 30  # that enough nodes wait for still more
TOLD = 75  # exit status of a rank whose failure rank 0 has told; sysexits.h calls it a temporary one


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
        alone = self.max_nodes == 1
        multiprocessing.set_forkserver_preload([*PRELOADED, "runner.launchers.torchrun"])
        launch_config = LaunchConfig(
            min_nodes=self.min_nodes,
            max_nodes=self.max_nodes,
            nproc_per_node=self.nproc_per_node,
            run_id=uuid.uuid4().hex if alone else self.rdzv_id,
            rdzv_backend="c10d",
            rdzv_endpoint=f"{self.host}:{self.port}",
            rdzv_configs={
                "join_timeout": math.ceil(self._meeting_s()),
                "read_timeout": math.ceil(self.join_timeout_s),
                "last_call_timeout": LAST_CALL_S,
                # torch finds it out by this machine's own name, which need not resolve.
                "is_host": alone or self._hosts_rendezvous(),
            },
            max_restarts=self.max_restarts,
            monitor_interval=0.05,
            start_method="forkserver",
            local_addr="localhost" if alone else self._own_address(),
            signals_to_handle="SIGHUP,SIGQUIT",  # the others are passed on, so that the ranks save
        )
        outcomes: dict[int, Outcome] = {}
        died, received, had_ranks = None, list[str](), threading.Event()
        try:
            watching = nullcontext() if rank_info.is_guest else self._ending_when_cut_off(had_ranks)
            with passing_signals_on(is_guest=rank_info.is_guest) as received, watching:
                outcomes = elastic_launch(launch_config, _run_rank)(config, request, self.join_timeout_s)
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            died = None if failure.exitcode == TOLD else how_it_died(rank, failure.exitcode)
        except RendezvousError as error:
            why = str(error) or type(error).__name__
            where = f"launcher.rdzv_endpoint={self.host}:{self.port}"
            if had_ranks.is_set():
                died = f"{where}: the nodes found each other no more ({why})"
            else:
                raise InputError(
                    f"{where}: {self.min_nodes} nodes did not find each other there within launcher.join_timeout_s="
                    f"{self.join_timeout_s:g} ({why}); is every one started?"
                ) from None
        return conclude(next(iter(outcomes.values()), None), died, received)

    @contextmanager
    def _ending_when_cut_off(self, had_ranks: threading.Event) -> Iterator[None]:
        """End this process when it has had no ranks for longer than meeting takes; the event says if it has had any.

        An agent asks the rendezvous' store all the time, and one that is cut off from it waits for the answer
        for as long as TCP does, whatever becomes of its ranks.
        """
        back = threading.Event()
        patience_s = self._meeting_s() + END_TIMEOUT_S

        def watch() -> None:
            last = time.monotonic()
            while not back.wait(0.5):
                if multiprocessing.active_children():
                    last = time.monotonic()
                    had_ranks.set()
                elif time.monotonic() - last > patience_s:
                    print(f"nothing answers at {self.host}:{self.port}, the nodes' rendezvous", file=sys.stderr)
                    sys.stdout.flush()
                    sys.stderr.flush()
                    os._exit(1)

        threading.Thread(target=watch, daemon=True).start()
        try:
            yield
        finally:
            back.set()

    def _meeting_s(self) -> float:
        return self.join_timeout_s + (LAST_CALL_S if self.max_nodes > self.min_nodes else 0)

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


def _run_rank(config: Config, request: Request, join_timeout_s: float) -> Outcome:
    """One rank's process; the agent has put into its environment which one."""
    rank_info = find_rank_info()
    outcome, leave = run_rank(config, request, rank_info, join_timeout_s)
    leave()
    if "failed" in outcome:
        sys.exit(TOLD)  # a rank that returns has succeeded, for an agent: it would wait for those of other nodes
    return outcome


def _bounds(nodes: Any) -> tuple[int, int]:
    first, _, last = str(nodes).partition(":")
    if not first.isdigit() or not (last or first).isdigit() or not 1 <= int(first) <= int(last or first):
        raise ValueError(f"launcher.nodes={nodes} must be a number of at least 1, or MIN:MAX, as 2 or 1:4")
    return int(first), int(last or first)
