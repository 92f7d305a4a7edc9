"""A run on several machines with an agent on each, as every launcher that starts processes elsewhere needs it."""

import itertools
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from runner.config.request import Request
from runner.distributed.failures.signals import PREEMPTED
from runner.errors import JobFailed, Preempted
from runner.launchers.agent import Assignment
from runner.launchers.agent_group import AgentGroup
from runner.launchers.followed_log import FollowedLog
from runner.launchers.machines import Agent, Machines
from runner.launchers.torchrun import REPEAT, Torchrun
from runner.records.run_directory import Destination, create_directory, new_directory
from runner.records.run_files import LOG, make_directory
from runner.records.run_record import DONE, RESULT, find_run, result_mtime_ns


@dataclass(frozen=True)
class AgentWorld:
    """How the agents of all machines form one world, which continues with `min_nodes` machines if others are lost."""

    source: str  # the launcher's name
    endpoint: str  # HOST:PORT of the rendezvous
    min_nodes: int
    max_restarts: int
    join_timeout_s: float
    host: int | None = 0  # the number of the machine that has the rendezvous; None if this process has it


def outputs_of(request: Request) -> Path:
    """Return the absolute path of the directory in which the run has its own, which all machines must see."""
    directory = request.destination.directory
    return Path(directory).absolute().parent if directory else Path(request.config.local_outputs)


def run_on_machines(machines: Machines, world: AgentWorld, request: Request) -> dict[str, float]:
    """Run an agent on each machine, and print the run's log meanwhile. Return the metrics, or raise as the job did."""
    config, directory = request.config, request.destination.directory
    path = Path(directory) if directory else new_directory(config.local_outputs, config.name)
    is_new = directory is None or create_directory(path)
    make_directory(path / world.source)
    if request.destination.file is not None:
        Path(request.destination.file).write_text(str(path))
    own = replace(request, destination=Destination(str(path)))
    logs = [path / world.source / f"{machine.name}.log" for machine in machines.machines]
    for log in logs:
        log.unlink(missing_ok=True)  # of an earlier attempt
    is_elastic = config.elastic_every_steps is not None
    followed, before = FollowedLog(path / LOG, only_new=not is_new), result_mtime_ns(path)

    def start(rdzv_id: str, number: int) -> Agent:
        launcher = _torchrun(machines, world, rdzv_id, number)
        assignment = Assignment(own, launcher, silence_s=machines.silence_s, save_s=machines.save_s)
        with logs[number].open("ab") as file:
            return machines.start(number, assignment, file, file)

    def why_lost(number: int, status: int) -> str | None:
        if is_elastic and status == REPEAT:
            return "it does not reach the rendezvous"
        return machines.why_lost(number, status, logs[number].read_text(errors="replace"))

    names, max_restarts = [machine.name for machine in machines.machines], world.max_restarts
    try:
        for number in itertools.count():
            start_agent = partial(start, f"runner{number}")  # the earlier agents have closed their rendezvous
            limits = (world.min_nodes, max_restarts, world.join_timeout_s)
            group = AgentGroup(names, start_agent, why_lost, *limits, machines.end_s, is_elastic, world.host)
            statuses = group.run(followed.print_new)
            if not group.is_interrupted:
                break
            max_restarts -= group.num_losses
        followed.print_new()
        is_recorded = result_mtime_ns(path) != before
        if group.signal is not None:
            raise Preempted(group.signal, str(path))
        if is_recorded and (run := find_run(path)).state in DONE:  # also if an agent came too late to take part
            return run.metrics
        if group.lost:
            text = group.lost + (f"; resume={path} continues the run" if (path / RESULT).exists() else "")
            print(f"error: {text}", file=sys.stderr, flush=True)
            raise JobFailed(text, directory=str(path))
        return _outcome(path, logs, statuses, is_recorded)
    finally:
        if is_new and not (path / RESULT).exists():
            shutil.rmtree(path)


def _torchrun(machines: Machines, world: AgentWorld, rdzv_id: str, number: int) -> Torchrun:
    """Return the launcher of the agent on a machine."""
    num, is_fixed = len(machines.machines), world.min_nodes == len(machines.machines)
    launcher = Torchrun(
        machines.machines[number].num,
        num if is_fixed else f"{world.min_nodes}:{num}",
        world.endpoint if num > 1 else None,
        rdzv_id,
        max_restarts=world.max_restarts,
        join_timeout_s=world.join_timeout_s,
        node_rank=number if is_fixed else None,
    )
    launcher.source, launcher.is_host, launcher.is_watched = world.source, number == world.host, True
    launcher.world_size = sum(machine.num for machine in machines.machines) if is_fixed else None
    return launcher


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
