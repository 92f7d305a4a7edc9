"""launcher=torchrun: torch's elastic agent, run by the runner itself, on one machine or on each of several."""

import math
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Literal

from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousParameters,
)

from runner.config.request import Request
from runner.distributed.backend import as_backend
from runner.distributed.environment import RankInfo
from runner.distributed.machine import check_open_files, check_shared_memory
from runner.distributed.network import address_towards, is_loopback
from runner.errors import InputError, JobFailed, print_messages
from runner.launchers.contract import Launcher
from runner.launchers.elastic import Ranks, recording_directory, run_worlds
from runner.launchers.env import check_options, parse_nodes
from runner.launchers.node_rendezvous import Nodes, OneMachine
from runner.launchers.rank_process import forwarding_signals, run_rank, start_fork_server
from runner.records.run_directory import Destination

MASTER_PORT = 29500  # torchrun's default
LAST_CALL_S = 30  # for which the minimum number of machines waits for more machines
NAME_POLL_S = 1.0
FILES, FILES_PER_RANK = 14, 8  # of the agent, the fork server and the store in this process
REPEAT = 75  # exit status of a node whose command with run_id must be repeated; sysexits.h's EX_TEMPFAIL
REPORT_S = 20.0  # for the ranks to report that a machine does not respond, after backend.timeout_s


class Torchrun(Launcher):
    """launcher=torchrun; conf/launcher/torchrun.yaml documents the options."""

    starts_processes = True
    is_elastic = True
    source = "torchrun"  # of the ranks
    save_s: float | None = None  # after a signal, until the ranks are killed; None: they end by themselves
    is_repeated = False  # a service repeats the command if another node is lost or has given up
    is_watched = False  # the process that has started this one and those on the other machines notices if one is lost

    def __init__(
        self,
        nproc_per_node: int | Literal["auto", "cpu", "gpu"] = 2,
        nodes: int | str = 1,
        rdzv_endpoint: str | None = None,
        rdzv_id: str = "runner",
        max_restarts: int = 0,
        join_timeout_s: float = 120.0,
        node_rank: int | None = None,
        master_addr: str | None = None,
        master_port: int = MASTER_PORT,
    ):
        if isinstance(nproc_per_node, str):
            nproc_per_node = _count_processes(nproc_per_node)
        check_options(join_timeout_s, max_restarts, nproc_per_node=nproc_per_node)
        self.min_nodes, self.max_nodes = parse_nodes(nodes)
        self.endpoint_key = "launcher.rdzv_endpoint" if rdzv_endpoint else "launcher.master_addr"
        if self.max_nodes == 1 and rdzv_endpoint:
            raise ValueError(f"launcher.rdzv_endpoint={rdzv_endpoint} needs several nodes; add launcher.nodes")
        if self.max_nodes > 1 and not rdzv_endpoint:
            if not master_addr:
                raise ValueError(f"launcher.nodes={nodes} needs launcher.rdzv_endpoint=HOST:PORT, their rendezvous")
            rdzv_endpoint = f"{master_addr}:{master_port}"
        if node_rank is not None and not (self.min_nodes == self.max_nodes and 0 <= node_rank < self.max_nodes):
            raise ValueError(
                f"launcher.node_rank={node_rank} must be at least 0 and below launcher.nodes={nodes}, a fixed number"
            )
        self.started_on_each = self.max_nodes > 1
        self.node_rank = node_rank  # None for any
        # Of the rendezvous; None if the endpoint decides.
        self.is_host = None if node_rank is None or self.endpoint_key != "launcher.master_addr" else node_rank == 0
        host, _, port = (rdzv_endpoint or "localhost:0").rpartition(":")
        if not host or not port.isdigit():
            raise ValueError(f"launcher.rdzv_endpoint={rdzv_endpoint} must be HOST:PORT, as node1:29400")
        self.host, self.port, self.rdzv_id = host.strip("[]"), int(port), rdzv_id
        self.nproc_per_node, self.max_restarts = nproc_per_node, max_restarts
        self.world_size = self.max_nodes * nproc_per_node if self.max_nodes == self.min_nodes else None
        self.join_timeout_s = join_timeout_s

    def launch(self, request: Request, rank_info: RankInfo) -> dict[str, float]:
        check_shared_memory(f"launcher={self.source}")
        check_open_files(f"launcher={self.source}", FILES + FILES_PER_RANK * self.nproc_per_node)
        start_fork_server()
        self.is_repeated = request.config.run_id is not None and self.source == Torchrun.source
        with (
            forwarding_signals(rank_info.is_embedded, self.save_s) as received,
            recording_directory(request.destination) as destination,
        ):
            arguments = (replace(request, destination=destination), self.join_timeout_s, self.source)
            max_replaced = self.max_restarts if request.config.elastic_every_steps is not None else None
            ranks = Ranks(self.nproc_per_node, run_rank, arguments, max_replaced, self.is_watched)
            # The ranks must report a lost machine before the agent notices it and terminates them.
            return self._run(ranks, destination, received, as_backend(request.config.backend).timeout_s + REPORT_S)

    def _run(
        self, ranks: Ranks, destination: Destination, received: Sequence[str], timeout_s: float
    ) -> dict[str, float]:
        """Run the job with these ranks on this machine. Arguments and results are those of `run_worlds` and `Nodes`."""
        if self.max_nodes == 1:
            return run_worlds(OneMachine(self.join_timeout_s), ranks, destination, self.max_restarts, received)
        where, nodes = f"{self.endpoint_key}={self.host}:{self.port}", None
        try:
            nodes = Nodes(self._parameters(), timeout_s, self.node_rank, ranks.max_replaced is not None)
            return run_worlds(nodes, ranks, destination, self.max_restarts, received)
        except RendezvousError as error:
            reason = str(error) or type(error).__name__
            is_lost = nodes is not None and isinstance(error, (RendezvousConnectionError, RendezvousClosedError))
            if nodes is None or not (nodes.worlds or (is_lost and self.is_repeated)):
                raise InputError(
                    f"{where}: {self.min_nodes} nodes did not find each other there within "
                    f"launcher.join_timeout_s={self.join_timeout_s:g} ({reason}); check that all are started"
                ) from None
            text, status = f"{where}: the nodes no longer found each other ({reason})", 1
            if is_lost:
                text = f"{where}: another node has given up, and reports why"
                status = REPEAT if self.is_repeated else 1
            if isinstance(error, RendezvousConnectionError):
                text = f"{where}, the rendezvous of the nodes, is lost: it does not respond"
                status = REPEAT if self.is_watched and ranks.max_replaced is not None else status
        if status == REPEAT:
            text += "" if self.is_watched else "; repeat the command"
        elif ranks.max_replaced is not None and (directory := destination.find()):
            text += f"; if other nodes continue, repeat the command; otherwise start every node with resume={directory}"
        elif directory := destination.find():
            text += f"; start every node again with resume={directory}"
        print(text, file=sys.stderr, flush=True)
        raise JobFailed(text, status)

    def _parameters(self) -> RendezvousParameters:
        last_call_s = min(LAST_CALL_S, self.join_timeout_s)
        join_s = self.join_timeout_s + (last_call_s if self.max_nodes > self.min_nodes else 0)
        own = self._own_address()
        return RendezvousParameters(
            backend="c10d",
            endpoint=f"{self.host}:{self.port}",
            run_id=self.rdzv_id,
            min_nodes=self.min_nodes,
            max_nodes=self.max_nodes,
            # If the endpoint is this machine's name, the others resolve it.
            local_addr=self.host if is_loopback(own) else own,
            join_timeout=math.ceil(join_s),
            last_call_timeout=math.ceil(last_call_s),
            read_timeout=math.ceil(self.join_timeout_s),
            # torch derives it from this machine's own name, which need not resolve.
            is_host=self._hosts_rendezvous(own) if self.is_host is None else self.is_host,
        )

    def _own_address(self) -> str:
        """Return this machine's address on the route to the rendezvous. Raise InputError if there is none.

        A service that sets the name of the first machine may start this one before the name is known.
        """
        deadline = time.monotonic() + (self.join_timeout_s if self.endpoint_key == "launcher.master_addr" else 0)
        is_first = True
        while True:
            try:
                return address_towards(self.host, self.endpoint_key)
            except InputError as error:
                if time.monotonic() > deadline:
                    raise
                if is_first:
                    print_messages([f"{error}; waiting up to {self.join_timeout_s:g} s for it"])
                is_first = False
            time.sleep(NAME_POLL_S)

    def _hosts_rendezvous(self, own: str) -> bool:
        """Return True if the endpoint is on this machine, and no agent serves it yet. own: this machine's address."""
        address = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)[0][4]
        # On Debian a machine's own name is an alias of its loopback address.
        if not is_loopback(own) and own != address[0]:
            return False
        with suppress(OSError), socket.create_connection((self.host, self.port)):
            return False
        return True


def _count_processes(nproc_per_node: int | str) -> int:
    """Return the number of processes, which is a number, or auto, cpu or gpu as in the command torchrun."""
    from torch.distributed.run import determine_local_world_size  # imported late, because it takes long

    try:
        return int(determine_local_world_size(str(nproc_per_node)))
    except ValueError as error:
        raise ValueError(f"launcher.nproc_per_node={nproc_per_node}: {error}; try a number, or auto") from None
