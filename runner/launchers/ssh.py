"""launcher=ssh: a run on several machines that ssh reaches, with an agent on each."""

import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from runner.config.request import Request
from runner.distributed.backend import as_backend
from runner.distributed.environment import RankInfo
from runner.distributed.failures.signals import PREEMPTED
from runner.distributed.network import is_loopback
from runner.errors import InputError, JobFailed, Preempted
from runner.launchers.agent import Assignment
from runner.launchers.agent_group import AgentGroup
from runner.launchers.agent_handle import AgentHandle
from runner.launchers.contract import Launcher
from runner.launchers.env import check_options
from runner.launchers.followed_log import FollowedLog
from runner.launchers.host_facts import HostFacts
from runner.launchers.ssh_hosts import SAVE_S, SILENCE_S, SshHosts, is_lost, parse_hosts, why_lost
from runner.launchers.torchrun import Torchrun
from runner.records.run_directory import Destination, create_directory, new_directory
from runner.records.run_files import LOG, make_directory
from runner.records.run_record import DONE, RESULT, find_run, result_mtime_ns


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

    def __post_init__(self) -> None:
        check_options(self.join_timeout_s, self.max_restarts, nproc_per_node=self.nproc_per_node)
        if not self.hosts:
            raise ValueError("launcher.hosts=[] must name machines; type launcher.hosts=[node1,node2]")
        hosts = parse_hosts("launcher", self.hosts, self.nproc_per_node)
        if self.rdzv_endpoint is not None:
            Torchrun(nodes=len(hosts), rdzv_endpoint=self.rdzv_endpoint)  # checks it
        if self.min_nodes is not None and self.min_nodes < len(hosts) and not self.max_restarts:
            raise ValueError(
                f"launcher.min_nodes={self.min_nodes} needs launcher.max_restarts, because the ranks start again "
                "without those of a lost machine; try launcher.max_restarts=3"
            )
        if self.min_nodes is not None and not 1 <= self.min_nodes <= len(hosts):
            raise ValueError(f"launcher.min_nodes={self.min_nodes} must be from 1 to {len(hosts)}, the number of hosts")
        self._ssh = SshHosts("launcher", hosts, self.python, self.env or {}, self.options)
        self.world_size = sum(host.num for host in hosts) if self.min_nodes in (None, len(hosts)) else None

    def launch(self, request: Request, rank_info: RankInfo) -> dict[str, float]:
        """Check the machines, run an agent on each, and print the run's log meanwhile. Return the run's metrics."""
        config, directory = request.config, request.destination.directory
        place = Path(directory).absolute().parent if directory else Path(config.outputs).absolute()
        facts = self._check_hosts(place, as_backend(config.backend).device_type())
        path = Path(directory) if directory else new_directory(config.outputs, config.name)
        is_new = directory is None or create_directory(path)
        make_directory(path / "ssh")
        if request.destination.file is not None:
            Path(request.destination.file).write_text(str(path))
        logs = [path / "ssh" / f"{host.name}.log" for host in self._ssh.hosts]
        for log in logs:
            log.unlink(missing_ok=True)  # of an earlier attempt
        followed, before = FollowedLog(path / LOG, only_new=not is_new), result_mtime_ns(path)

        def start(number: int) -> AgentHandle:
            own, launcher = replace(request, destination=Destination(str(path))), self._torchrun(number, facts)
            assignment = Assignment(own, launcher, silence_s=SILENCE_S, save_s=SAVE_S)
            with logs[number].open("ab") as file:
                return self._ssh.start(self._ssh.hosts[number], assignment, file, file)

        def find_loss(number: int, status: int) -> str | None:
            return why_lost(logs[number].read_text(errors="replace")) if is_lost(status) else None

        num_needed = self.min_nodes or len(self._ssh.hosts)
        names = [host.name for host in self._ssh.hosts]
        group = AgentGroup(names, start, find_loss, num_needed, self.max_restarts, self.join_timeout_s)
        statuses = group.run(followed.print_new)
        followed.print_new()
        is_recorded = result_mtime_ns(path) != before
        try:
            if group.signal is not None:
                raise Preempted(group.signal, str(path))
            if group.lost and not (is_recorded and find_run(path).state in DONE):
                text = group.lost + (f"; resume={path} continues the run" if (path / RESULT).exists() else "")
                print(f"error: {text}", file=sys.stderr, flush=True)
                raise JobFailed(text, directory=str(path))
            return _outcome(path, logs, statuses, is_recorded)
        finally:
            if is_new and not (path / RESULT).exists():
                shutil.rmtree(path)

    def _torchrun(self, number: int, facts: Sequence[HostFacts]) -> Torchrun:
        """Return the launcher of the agent on a machine. The first machine has the rendezvous."""
        num, least = len(self._ssh.hosts), self.min_nodes or len(self._ssh.hosts)
        endpoint = self.rdzv_endpoint or f"{facts[0].address}:{facts[0].port}"
        launcher = Torchrun(
            self._ssh.hosts[number].num,
            num if least == num else f"{least}:{num}",
            endpoint if num > 1 else None,
            max_restarts=self.max_restarts,
            join_timeout_s=self.join_timeout_s,
            node_rank=number if least == num else None,
        )
        launcher.source, launcher.is_host, launcher.world_size = "ssh", number == 0, self.world_size
        return launcher

    def _check_hosts(self, outputs: Path, device_type: str) -> list[HostFacts]:
        """Return the facts of the machines. Raise InputError if they are no machines for the ranks."""
        facts = self._ssh.check(outputs)
        for host, each in zip(self._ssh.hosts, facts, strict=True):
            if device_type == "cuda" and each.num_gpus < host.num:
                raise InputError(f"launcher.hosts={host.name}: {each.num_gpus} GPUs for {host.num} ranks")
        if len(facts) > 1 and self.rdzv_endpoint is None and is_loopback(facts[0].address):
            raise InputError(
                f"launcher.hosts={self._ssh.hosts[0].name}: ssh reaches it by {facts[0].address}, which the other "
                "machines cannot; set launcher.rdzv_endpoint=ADDRESS:PORT"
            )
        return facts


def _outcome(path: Path, logs: Sequence[Path], statuses: Mapping[int, int], is_recorded: bool) -> dict[str, float]:
    """Return the metrics of the run, or raise as the job did. A failure that no rank has recorded is printed.

    statuses: of the agents, by number, the earliest first.
    """
    run, failed = find_run(path), [number for number, status in statuses.items() if status not in (0, PREEMPTED)]
    if PREEMPTED in statuses.values() and not failed:
        raise Preempted("a machine was stopped", str(path))
    if not failed:
        return run.metrics
    text = (run.error if is_recorded else None) or ""
    if not text:
        text = logs[failed[0]].read_text(errors="replace").strip()
        print(text, file=sys.stderr, flush=True)
    raise JobFailed(text, statuses[failed[0]], str(path))
