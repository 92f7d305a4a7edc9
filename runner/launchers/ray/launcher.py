"""launcher=ray: a run on nodes of a Ray cluster, with an agent on each."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from runner.config.request import Request
from runner.distributed.backend import as_backend
from runner.distributed.environment import RankInfo
from runner.distributed.rendezvous import serve_store
from runner.errors import InputError
from runner.launchers.contract import Launcher
from runner.launchers.env import check_gpus, check_options, check_restarts
from runner.launchers.machine_run import AgentWorld, outputs_of, run_on_machines
from runner.launchers.machines import check_machines, warn_of_used_gpus
from runner.launchers.ray.nodes import RayNodes


@dataclass
class Ray(Launcher):
    """launcher=ray; conf/launcher/ray.yaml documents the options."""

    address: str = "auto"
    nodes: int | str = 1
    nproc_per_node: int = 2
    cpus_per_node: int | None = None
    gpus_per_node: int | None = None
    resources: Mapping[str, Any] | None = None
    labels: Mapping[str, Any] | None = None
    env: Mapping[str, Any] | None = None
    wait: bool = False
    max_restarts: int = 0
    join_timeout_s: float = 300.0

    starts_processes = True
    uses_machines = True
    is_elastic = True

    def __post_init__(self) -> None:
        check_options(self.join_timeout_s, self.max_restarts, nproc_per_node=self.nproc_per_node)
        least, most = self._make_nodes().limits
        check_restarts(f"launcher.nodes={self.nodes}", least, most, self.max_restarts)
        check_gpus(self.nproc_per_node, self.gpus_per_node)
        self.world_size = most * self.nproc_per_node if least == most else None

    def launch(self, request: Request, rank_info: RankInfo) -> dict[str, float]:
        """Reserve and check the nodes, and run an agent on each. Return the metrics, or raise as the job did."""
        if not self.gpus_per_node and as_backend(request.config.backend).device_type() == "cuda":
            raise InputError(
                f"launcher.gpus_per_node={self.gpus_per_node}: the backend uses GPUs, which Ray assigns; try "
                f"launcher.gpus_per_node={self.nproc_per_node}, or backend=gloo"
            )
        nodes, endpoint = self._make_nodes(), ""
        try:
            facts = check_machines(nodes, outputs_of(request), request.command.config_dirs)
            for machine, each in zip(nodes.machines, facts, strict=True):
                warn_of_used_gpus(f"launcher.nodes={machine.name}", each, each.num_gpus)
            if len(nodes.machines) > 1:  # this process serves the rendezvous, so that any of the nodes may be lost
                from ray.util import get_node_ip_address

                address = get_node_ip_address()
                store = serve_store(address, 0, loopback=False, timeout_s=self.join_timeout_s)
                endpoint = f"{address}:{store.port}"
            world = AgentWorld("ray", endpoint, nodes.limits[0], self.max_restarts, self.join_timeout_s, host=None)
            return run_on_machines(nodes, world, request)
        finally:
            nodes.close()

    def _make_nodes(self) -> RayNodes:
        return RayNodes(
            "launcher",
            self.nproc_per_node,
            self.address,
            self.nodes,
            self.cpus_per_node,
            self.gpus_per_node,
            self.resources,
            self.labels,
            self.env,
            self.wait,
        )
