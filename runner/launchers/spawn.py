"""Processes on this machine, or on each of several, started by the runner itself with torch.multiprocessing."""

import os
import sys
import time
from multiprocessing.connection import Connection, wait
from typing import Any

import torch.multiprocessing as mp

from runner.config.schema import Config
from runner.distributed.environment import RankInfo
from runner.distributed.rendezvous import serve_store
from runner.launchers.env import checked_timeout
from runner.launchers.rank_process import (
    END_TIMEOUT_S,
    TOLD,
    Outcome,
    begin_rank,
    passing_signals_on,
    run_rank,
    start_fork_server,
)
from runner.launchers.restarts import how_it_died
from runner.launchers.start_again import run_again_while_it_gets_on
from runner.runs.run_directory import Request

MASTER_PORT = 29500  # torchrun's, where none is given


class Spawn:
    """launcher=spawn: nproc_per_node processes on this machine, which is number node_rank of `nodes`.

    On one machine this process serves the store, on loopback and a free port; on several, rank 0 does at
    master_addr:master_port.
    """

    starts_processes = True
    queues = False

    def __init__(
        self,
        nproc_per_node: int = 2,
        nodes: int = 1,
        node_rank: int = 0,
        master_addr: str | None = None,
        master_port: int | None = None,
        max_restarts: int = 0,
        join_timeout_s: float = 120.0,
    ):
        if nproc_per_node < 1:
            raise ValueError(f"launcher.nproc_per_node={nproc_per_node} must be at least 1; try 2")
        if nodes < 1:
            raise ValueError(f"launcher.nodes={nodes} must be at least 1")
        if not 0 <= node_rank < nodes:
            raise ValueError(f"launcher.node_rank={node_rank} must be at least 0 and below launcher.nodes={nodes}")
        if max_restarts < 0:
            raise ValueError(f"launcher.max_restarts={max_restarts} must be at least 0")
        if nodes > 1 and max_restarts:
            raise ValueError(
                f"launcher.max_restarts={max_restarts} has an effect on one machine; on several, type launcher=torchrun"
            )
        if nodes > 1 and not master_addr:
            raise ValueError(f"launcher.nodes={nodes} needs launcher.master_addr, the name or address of the first one")
        if nodes == 1 and master_addr:
            raise ValueError(f"launcher.master_addr={master_addr} has an effect on several nodes; add launcher.nodes")
        if nodes == 1 and master_port is not None:
            raise ValueError(
                f"launcher.master_port={master_port} has an effect on several nodes; on one machine a free port is "
                "found, so leave it out"
            )
        if master_port is not None and not 0 < master_port < 2**16:
            raise ValueError(f"launcher.master_port={master_port} must be from 1 to 65535; try {MASTER_PORT}")
        self.nproc_per_node, self.nodes, self.node_rank = nproc_per_node, nodes, node_rank
        self.max_restarts = max_restarts
        self.started_on_each, self.world_size = nodes > 1, nodes * nproc_per_node
        self.master_addr, self.master_port = master_addr or "localhost", master_port or MASTER_PORT
        self.join_timeout_s = checked_timeout(join_timeout_s)

    def launch(self, config: Config, request: Request, rank_info: RankInfo) -> dict[str, float]:
        start_fork_server()
        processes: list[Any] = []
        with passing_signals_on(lambda: processes, rank_info.is_guest) as received:
            return run_again_while_it_gets_on(
                lambda request: self._run_world(config, request, processes), request, self.max_restarts, received
            )

    def _run_world(self, config: Config, request: Request, processes: list[Any]) -> tuple[Outcome | None, str | None]:
        """Start the ranks, which are in `processes` then, and wait until they have ended; as `_watch`."""
        store = serve_store("localhost", 0, True, self.join_timeout_s) if self.nodes == 1 else None
        port = store.port if store else self.master_port
        first = self.node_rank * self.nproc_per_node
        ranks = [
            RankInfo(
                rank=first + local_rank,
                local_rank=local_rank,
                world_size=self.world_size,
                local_world_size=self.nproc_per_node,
                found="spawn",
                master_addr=self.master_addr,
                master_port=port,
                hosts_store=store is None and first + local_rank == 0,
                on_one_machine=self.nodes == 1,
                has_parent=True,
            )
            for local_rank in range(self.nproc_per_node)
        ]
        context = mp.get_context("forkserver")
        ours, theirs = context.Pipe(duplex=False)
        processes[:] = [
            context.Process(
                target=_run_rank,
                args=(config, request, rank_info, self.join_timeout_s, theirs if rank_info.local_rank == 0 else None),
            )
            for rank_info in ranks
        ]
        for process in processes:
            process.start()
        theirs.close()
        ended = _watch(processes, ours, first)
        ours.close()
        del store  # it has served until here
        return ended


def _run_rank(
    config: Config, request: Request, rank_info: RankInfo, timeout_s: float, parent: Connection | None
) -> None:
    """One rank's process; the first one tells the parent how the job ended."""
    begin_rank()
    os.environ |= {
        "RANK": str(rank_info.rank),
        "LOCAL_RANK": str(rank_info.local_rank),
        "WORLD_SIZE": str(rank_info.world_size),
        "LOCAL_WORLD_SIZE": str(rank_info.local_world_size),
        "MASTER_ADDR": rank_info.master_addr,
        "MASTER_PORT": str(rank_info.master_port),
    }
    outcome, leave = run_rank(config, request, rank_info, timeout_s)
    if parent is not None:
        parent.send(outcome)
    leave()
    if "failed" in outcome:
        sys.exit(TOLD)  # the others have a limited time from now on


def _watch(processes: list[Any], from_first: Connection, first: int) -> tuple[Outcome | None, str | None]:
    """Wait until all have ended. Returns what the first one said, and which rank died of what."""
    outcome, died, deadline, speaks = None, None, float("inf"), [from_first]
    while alive := [process for process in processes if process.is_alive()]:
        ready = wait(
            [*(process.sentinel for process in alive), *speaks],
            timeout=min(max(deadline - time.monotonic(), 0), 60.0),
        )
        if from_first in ready:
            outcome, speaks = _hear(from_first), []
        dead = [number for number, process in enumerate(processes) if process.exitcode]
        if dead and deadline == float("inf"):
            deadline = time.monotonic() + END_TIMEOUT_S
        untold = [number for number in dead if processes[number].exitcode != TOLD]
        if died is None and untold and time.monotonic() < deadline:  # later they are killed below
            died = how_it_died(first + untold[0], processes[untold[0]].exitcode)
        if time.monotonic() > deadline:
            for process in alive:
                process.kill()
    for process in processes:
        process.join()
    return outcome or (_hear(from_first) if speaks and from_first.poll() else None), died


def _hear(connection: Connection) -> Outcome | None:
    try:
        return connection.recv()
    except EOFError:  # the rank ended without a word
        return None
