"""launcher=spawn: ranks on this machine, or on several machines in a given order."""

from runner.launchers.torchrun import MASTER_PORT, Torchrun


class Spawn(Torchrun):
    """launcher=spawn; conf/launcher/spawn.yaml documents the options."""

    source = "spawn"

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
        if nodes > 1 and not 0 <= node_rank < nodes:
            raise ValueError(f"launcher.node_rank={node_rank} must be at least 0 and below launcher.nodes={nodes}")
        if nodes > 1 and not master_addr:
            raise ValueError(f"launcher.nodes={nodes} needs launcher.master_addr, the name or address of node 0")
        if master_port is not None and not 0 < master_port < 2**16:
            raise ValueError(f"launcher.master_port={master_port} must be from 1 to 65535; try {MASTER_PORT}")
        several = {"node_rank": node_rank, "master_addr": master_addr, "master_port": master_port}
        for key, value in several.items():
            if nodes == 1 and value:
                raise ValueError(f"launcher.{key}={value} needs several nodes; add launcher.nodes")
        where = (node_rank, master_addr, master_port or MASTER_PORT)
        super().__init__(nproc_per_node, nodes, None, "spawn", max_restarts, join_timeout_s, *where)
