"""launcher=ssh: a run on several machines that ssh reaches, with an agent on each."""

import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from runner.config.request import Request
from runner.distributed.backend import as_backend
from runner.distributed.environment import RankInfo
from runner.distributed.failures.signals import PREEMPTED, received
from runner.distributed.network import is_loopback
from runner.errors import InputError, JobFailed, Preempted
from runner.launchers.agent import Assignment
from runner.launchers.agent_group import AgentGroup
from runner.launchers.agent_handle import AgentHandle
from runner.launchers.contract import Launcher
from runner.launchers.env import check_options
from runner.launchers.followed_log import FollowedLog
from runner.launchers.host_facts import HostFacts, find_facts
from runner.launchers.torchrun import Torchrun
from runner.records.run_directory import Destination, new_directory
from runner.records.run_files import LOG, make_directory
from runner.records.run_record import RESULT, find_run, result_mtime_ns

# ssh ends with LOST if it cannot connect, or after ALIVE_S seconds without a response.
LOST, CONNECT_S, ALIVE_S = 255, 8, 5
OPTIONS = ("BatchMode=yes", f"ConnectTimeout={CONNECT_S}", f"ServerAliveInterval={ALIVE_S}", "ServerAliveCountMax=3")
SILENCE_S = 15.0  # after which an agent without a message from here saves and exits
SAVE_S = 30.0


class Host(NamedTuple):
    """A machine by the name that ssh knows, and its number of ranks."""

    name: str
    num_ranks: int


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
        self._hosts = [_parse(text, self.nproc_per_node) for text in map(str, self.hosts)]
        names = [host.name for host in self._hosts]
        if len({*names}) < len(names):
            raise ValueError(f"launcher.hosts={list(self.hosts)}: each machine once; NAME:4 starts four ranks there")
        if self.min_nodes is not None and not 1 <= self.min_nodes <= len(names):
            raise ValueError(f"launcher.min_nodes={self.min_nodes} must be from 1 to {len(names)}, the number of hosts")
        is_fixed = self.min_nodes in (None, len(names))
        self.world_size = sum(host.num_ranks for host in self._hosts) if is_fixed else None

    def launch(self, request: Request, rank_info: RankInfo) -> dict[str, float]:
        """Check the machines, run an agent on each, and print the run's log meanwhile. Return the run's metrics."""
        if shutil.which("ssh") is None:
            raise InputError("launcher=ssh needs the command ssh, which is not on this machine; install it")
        config, directory = request.config, request.destination.directory
        facts = self._check_hosts(Path(config.outputs).absolute(), as_backend(config.backend).device_type())
        is_new = directory is None or not Path(directory).exists()
        path = Path(directory) if directory else new_directory(config.outputs, config.name)
        logs = [path / "ssh" / f"{host.name}.log" for host in self._hosts]
        make_directory(path / "ssh")
        if request.destination.file is not None:
            Path(request.destination.file).write_text(str(path))
        log, before = FollowedLog(path / LOG, only_new=not is_new), result_mtime_ns(path)

        def start(number: int) -> AgentHandle:
            own, launcher = replace(request, destination=Destination(str(path))), self._torchrun(number, facts)
            assignment = Assignment(own, launcher, silence_s=SILENCE_S, save_s=SAVE_S)
            with logs[number].open("ab") as file:
                return AgentHandle(assignment, file, file, self._command(self._hosts[number], "agent"))

        def why_lost(number: int, status: int) -> str | None:
            return _last_line(logs[number].read_text(errors="replace")) if status == LOST or status < 0 else None

        num_needed = self.min_nodes or len(self._hosts)
        names = [host.name for host in self._hosts]
        group = AgentGroup(names, start, why_lost, num_needed, self.max_restarts, self.join_timeout_s)
        statuses = group.run(log.print_new)
        log.print_new()
        try:
            return self._outcome(path, logs, statuses, group.lost, is_recorded=result_mtime_ns(path) != before)
        finally:
            if is_new and not (path / RESULT).exists():
                shutil.rmtree(path)

    def _outcome(
        self, path: Path, logs: Sequence[Path], statuses: Sequence[int], lost: str, is_recorded: bool
    ) -> dict[str, float]:
        """Return the metrics of the run, or raise as the job did. A failure that no rank has reported is printed."""
        directory, run, failed = str(path), find_run(path), [each for each in statuses if each not in (0, PREEMPTED)]
        if received() or (PREEMPTED in statuses and not failed):
            raise Preempted(received() or "a machine was stopped", directory)
        if lost:
            text = f"{lost}; resume={directory} continues the run"
            print(f"error: {text}", file=sys.stderr, flush=True)
            raise JobFailed(text, directory=directory)
        if not failed:
            return run.metrics
        text = (run.error if is_recorded else None) or ""
        if not text:
            text = logs[statuses.index(failed[0])].read_text(errors="replace").strip()
            print(text, file=sys.stderr, flush=True)
        raise JobFailed(text, failed[0], directory)

    def _torchrun(self, number: int, facts: Sequence[HostFacts]) -> Torchrun:
        """Return the launcher of the agent on a machine. The first machine has the rendezvous."""
        num, least = len(self._hosts), self.min_nodes or len(self._hosts)
        endpoint = self.rdzv_endpoint or f"{facts[0].address}:{facts[0].port}"
        launcher = Torchrun(
            self._hosts[number].num_ranks,
            num if least == num else f"{least}:{num}",
            endpoint if num > 1 else None,
            max_restarts=self.max_restarts,
            join_timeout_s=self.join_timeout_s,
            node_rank=number if least == num else None,
        )
        launcher.source, launcher.is_host, launcher.world_size = "ssh", number == 0, self.world_size
        return launcher

    def _check_hosts(self, outputs: Path, device_type: str) -> list[HostFacts]:
        """Return the facts of the machines. Raise InputError, which names what is wrong on each of them."""
        existing = next(each for each in (outputs, *outputs.parents) if each.is_dir())
        with tempfile.NamedTemporaryFile(dir=existing, prefix=".shared-") as shared:
            own = find_facts(Path(shared.name))

            def ask(host: Host) -> HostFacts | str:
                command = self._command(host, "host_facts", shared.name)
                done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
                if done.returncode:
                    return _last_line(done.stderr)
                return HostFacts(**json.loads(done.stdout.splitlines()[-1]))

            with ThreadPoolExecutor(len(self._hosts)) as pool:
                found = [*pool.map(ask, self._hosts)]
        facts, messages = list[HostFacts](), list[str]()
        for host, each in zip(self._hosts, found, strict=True):
            if isinstance(each, HostFacts):
                facts.append(each)
                each = "; ".join(_differences(host, each, own, outputs, device_type))
            if each:
                messages.append(f"launcher.hosts={host.name}: {each}")
        if not messages and len(facts) > 1 and self.rdzv_endpoint is None and is_loopback(facts[0].address):
            messages.append(
                f"launcher.hosts={self._hosts[0].name}: ssh reaches it by {facts[0].address}, which the other machines "
                "cannot; set launcher.rdzv_endpoint=ADDRESS:PORT"
            )
        if messages:
            raise InputError(*messages)
        return facts

    def _command(self, host: Host, module: str, *arguments: str) -> list[str]:
        """Return the command that runs a module of this package on a machine, in the working directory."""
        options = [word for option in OPTIONS for word in ("-o", option)]
        variables = [f"{name}={value}" for name, value in (self.env or {}).items()]
        words = ["env", *variables, self.python or sys.executable, "-m", f"runner.launchers.{module}", *arguments]
        script = f"cd {shlex.quote(os.getcwd())} && exec {shlex.join(words)}"
        return ["ssh", *options, *map(str, self.options), "--", host.name, script]


def _parse(text: str, num_ranks: int) -> Host:
    """Return the machine of `NAME` or `NAME:NUMBER`."""
    name, _, number = text.partition(":")
    number = number or str(num_ranks)
    if not name or "/" in name or not number.isdigit() or int(number) < 1:
        raise ValueError(
            f"launcher.hosts: {text} must be NAME or NAME:RANKS, as node1 or node1:4; write ports into ~/.ssh/config"
        )
    return Host(name, int(number))


def _differences(host: Host, facts: HostFacts, own: HostFacts, outputs: Path, device_type: str) -> list[str]:
    """Return what keeps the machine from running the ranks of this command."""
    found = [
        f"{package} {version}, but {own.versions[package]} here"
        for package, version in facts.versions.items()
        if version != own.versions[package]
    ]
    if facts.code != own.code and not found:
        found.append("another state of the runner's code than here")
    if not facts.sees_file:
        found.append(f"does not see the files in {outputs}; set outputs= to a shared directory")
    if device_type == "cuda" and facts.num_gpus < host.num_ranks:
        found.append(f"{facts.num_gpus} GPUs for {host.num_ranks} ranks")
    return found


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "no response"
