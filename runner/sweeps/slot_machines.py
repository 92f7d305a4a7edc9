"""The machines on which hydra/launcher=slots runs jobs, with their devices divided into slots."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Any

from runner.config.schema import Config
from runner.distributed.backend import as_backend
from runner.errors import InputError
from runner.launchers.agent import Assignment
from runner.launchers.agent_handle import AgentHandle
from runner.launchers.ssh_hosts import SAVE_S, SILENCE_S, SshHosts, parse_hosts
from runner.process.cores import allowed_cores


@dataclass
class SlotMachine:
    """A machine with slots. start: starts the agent of an assignment there; its arguments are those of AgentHandle."""

    name: str | None  # None for this machine
    cores: list[list[int]]  # of each slot
    gpus: list[list[int]]
    start: Callable[[Assignment, IO[bytes] | int, IO[bytes] | int], AgentHandle]
    silence_s: float | None = None  # as in Assignment
    save_s: float = 0.0
    free: list[int] = field(default_factory=list)  # the slots that no job uses
    is_lost: bool = False

    @property
    def num_slots(self) -> int:
        return len(self.cores)

    def assign(self, request: Any, slots: Sequence[int]) -> Assignment:
        """Return the assignment of a job that runs on these slots."""
        cores, gpus = ([each for slot in slots for each in of[slot]] for of in (self.cores, self.gpus))
        return Assignment(request, None, cores, gpus, self.silence_s, self.save_s)


def find_machines(
    slots: Any, hosts: Sequence[str], options: Mapping[str, Any], configs: Sequence[Config]
) -> list[SlotMachine]:
    """Return the machines: this one, or those that ssh reaches by the names `hosts`.

    options: those of SshHosts. configs: of the jobs. Raises InputError if a machine lacks devices for its slots, or is
    not reached.
    """
    if not hosts:
        num_gpus = _count_gpus(configs)
        _check_slots(slots, len(allowed_cores()), num_gpus, "here")
        cores, gpus = divide(sorted(allowed_cores()), slots), divide(range(num_gpus), slots)
        return [SlotMachine(None, cores, gpus, AgentHandle)]
    try:
        ssh = SshHosts("hydra.launcher", parse_hosts("hydra.launcher", hosts, slots), **options)
    except ValueError as error:
        raise InputError(str(error)) from None
    machines = []
    for host, facts in zip(ssh.hosts, ssh.check(Path(configs[0].outputs).absolute()), strict=True):
        _check_slots(host.num, len(facts.cores), facts.num_gpus, f"on {host.name}")
        cores, gpus = divide(facts.cores, host.num), divide(range(facts.num_gpus), host.num)
        machines.append(SlotMachine(host.name, cores, gpus, partial(ssh.start, host), SILENCE_S, SAVE_S))
    return machines


def divide(devices: Sequence[int], slots: int) -> list[list[int]]:
    """Return the devices of each slot, equally many for each; the remainder is not used."""
    size = len(devices) // slots
    return [list(devices[slot * size : (slot + 1) * size]) for slot in range(slots)]


def _check_slots(slots: Any, num_cores: int, num_gpus: int, where: str) -> None:
    devices, kind = (num_gpus, "GPUs") if num_gpus else (num_cores, "CPU cores")
    if not isinstance(slots, int) or not 1 <= slots <= devices:
        raise InputError(
            f"hydra.launcher.slots={slots} must be an integer from 1 to {devices}, the number of {kind} that the jobs "
            f"can use {where}"
        )


def _count_gpus(configs: Sequence[Config]) -> int:
    """Return the number of GPUs on this machine; 0 if all jobs run on the CPU."""
    import torch

    if any(as_backend(config.backend).device_type() == "cuda" for config in configs):
        return torch.cuda.device_count()
    return 0
