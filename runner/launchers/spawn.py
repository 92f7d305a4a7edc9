"""launcher=spawn: ranks on this machine, or on several machines on each of which the same command is started."""

import os

from runner.config.schema import Config
from runner.distributed.environment import RankInfo
from runner.launchers.elastic import Ranks, recording_directory, run_worlds
from runner.launchers.env import check_options
from runner.launchers.node_rendezvous import OneMachine
from runner.launchers.protocol import Launcher
from runner.launchers.rank_process import Outcome, forwarding_signals, run_rank, start_fork_server
from runner.records.run_directory import Request

MASTER_PORT = 29500  # torchrun's default


class Spawn(Launcher):
    """Start `nproc_per_node` ranks on this machine, which is number `node_rank` of `nodes`.

    On one machine this process serves the ranks' store, on loopback and a free port. On several machines rank 0 serves
    it at master_addr:master_port.
    """

    starts_processes = True

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
        check_options(join_timeout_s, max_restarts, nproc_per_node=nproc_per_node, nodes=nodes)
        if not 0 <= node_rank < nodes:
            raise ValueError(f"launcher.node_rank={node_rank} must be at least 0 and below launcher.nodes={nodes}")
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
        self.join_timeout_s = join_timeout_s

    def launch(self, config: Config, request: Request, rank_info: RankInfo) -> dict[str, float]:
        start_fork_server()
        address = (self.master_addr, self.master_port) if self.nodes > 1 else None
        with forwarding_signals(rank_info.is_embedded) as received, recording_directory(request) as request:
            args = (config, request, self.join_timeout_s, self.node_rank, self.nodes)
            ranks = Ranks(self.nproc_per_node, _run_rank, args, first=self.node_rank * self.nproc_per_node)
            return run_worlds(OneMachine(self.join_timeout_s, address), ranks, request, self.max_restarts, received)


def _run_rank(config: Config, request: Request, join_timeout_s: float, node_rank: int, nodes: int) -> Outcome:
    """Run one rank of several machines; the agent of each machine numbers its own ranks from 0."""
    local_world_size = int(os.environ["LOCAL_WORLD_SIZE"])
    rank = node_rank * local_world_size + int(os.environ["LOCAL_RANK"])
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(nodes * local_world_size)}
    return run_rank(config, request, join_timeout_s, {"source": "spawn", "hosts_store": nodes > 1 and rank == 0})
