"""launcher=ssh: a run on several machines that ssh reaches, with an agent on each."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from runner.config.request import Request
from runner.distributed.backend import as_backend
from runner.distributed.environment import RankInfo
from runner.distributed.network import is_loopback
from runner.errors import InputError
from runner.launchers.contract import Launcher
from runner.launchers.env import check_options, check_restarts
from runner.launchers.machine_run import AgentWorld, outputs_of, run_on_machines
from runner.launchers.machines import check_machines, warn_of_used_gpus
from runner.launchers.ssh_hosts import SshHosts
from runner.launchers.torchrun import Torchrun


@dataclass
class Ssh(Launcher):
    """launcher=ssh; conf/launcher/ssh.yaml documents the options."""

    hosts: Sequence[str] = ()
    nproc_per_node: int = 2
    min_nodes: int | None = None
    rdzv_endpoint: str | None = None
    python: str | None = None
    env: Mapping[str, Any] | None = None
    options: Sequence[str] = ()
    max_restarts: int = 0
    join_timeout_s: float = 120.0

    starts_processes = True
    uses_machines = True
    is_elastic = True

    def __post_init__(self) -> None:
        check_options(self.join_timeout_s, self.max_restarts, nproc_per_node=self.nproc_per_node)
        self._hosts = SshHosts("launcher", self.nproc_per_node, self.hosts, self.python, self.env, self.options)
        num = len(self.hosts)
        if self.rdzv_endpoint is not None:
            Torchrun(nodes=num, rdzv_endpoint=self.rdzv_endpoint)  # checks it
        if self.min_nodes is not None:
            given = f"launcher.min_nodes={self.min_nodes}"
            check_restarts(given, self.min_nodes, num, self.max_restarts)
            if not 1 <= self.min_nodes <= num:
                raise ValueError(f"{given} must be from 1 to {num}, the number of hosts")
        num_ranks = sum(machine.num for machine in self._hosts.machines)
        self.world_size = num_ranks if self.min_nodes in (None, num) else None

    def launch(self, request: Request, rank_info: RankInfo) -> dict[str, float]:
        """Check the machines, and run an agent on each. Return the run's metrics, or raise as the job did."""
        machines, backend = self._hosts.machines, as_backend(request.config.backend)
        facts = check_machines(self._hosts, outputs_of(request), request.command.config_dirs)
        for machine, each in zip(machines, facts, strict=True):
            if each.num_gpus < machine.num and backend.device_type() == "cuda":
                raise InputError(f"launcher.hosts={machine.name}: {each.num_gpus} GPUs for {machine.num} ranks")
            if backend.device != "cpu":
                warn_of_used_gpus(f"launcher.hosts={machine.name}", each, machine.num)
        if len(facts) > 1 and self.rdzv_endpoint is None and is_loopback(facts[0].address):
            raise InputError(
                f"launcher.hosts={machines[0].name}: ssh reaches it by {facts[0].address}, which the other "
                "machines cannot; set launcher.rdzv_endpoint=ADDRESS:PORT"
            )
        endpoint = self.rdzv_endpoint or f"{facts[0].address}:{facts[0].port}"
        least = self.min_nodes or len(machines)
        world = AgentWorld("ssh", endpoint, least, self.max_restarts, self.join_timeout_s)
        return run_on_machines(self._hosts, world, request)
