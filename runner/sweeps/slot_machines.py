"""The machines on which jobs run in parallel, with their devices divided into slots."""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from runner.config.custom_dirs import searched_dirs
from runner.config.diagnostics.import_target import locate_callable
from runner.config.request import Request
from runner.config.schema import Config
from runner.distributed.backend import as_backend
from runner.errors import InputError
from runner.launchers.agent import Assignment
from runner.launchers.agent_process import AgentProcess
from runner.launchers.host_facts import HostFacts, find_facts
from runner.launchers.machines import Agent, Machine, Machines, check_machines, warn_of_used_gpus
from runner.process.cores import allowed_cores


class ThisMachine(Machines):
    """This machine, which is not lost as long as this process runs."""

    machines = (Machine("", 1),)

    def find_facts(self, number: int, shared: str) -> HostFacts:
        return find_facts(Path(shared))

    def start(
        self, number: int, assignment: Assignment, output: IO[bytes] | int, errors: IO[bytes] | int
    ) -> AgentProcess:
        return AgentProcess(assignment, output, errors)

    def why_lost(self, number: int, status: int, output: str) -> None:
        return None


@dataclass
class SlotMachine:
    """A machine with slots: the one with this number among `machines`."""

    machines: Machines
    number: int
    cores: list[list[int]]  # of each slot
    gpus: list[list[int]]
    free: list[int] = field(default_factory=list)  # the slots that no job uses
    is_lost: bool = False

    @property
    def name(self) -> str:
        """Its name; empty for this machine."""
        return self.machines.machines[self.number].name

    @property
    def num_slots(self) -> int:
        return len(self.cores)

    def start(self, request: Request, slots: Sequence[int], output: IO[bytes] | int, errors: IO[bytes] | int) -> Agent:
        """Start the agent of a job on these slots. output, errors: as in `Machines.start`."""
        cores, gpus = ([each for slot in slots for each in of[slot]] for of in (self.cores, self.gpus))
        assignment = Assignment(request, None, cores, gpus, self.machines.silence_s, self.machines.save_s)
        return self.machines.start(self.number, assignment, output, errors)

    def why_lost(self, status: int, output: str) -> str | None:
        return self.machines.why_lost(self.number, status, output)


def find_machines(
    slots: Any, kind: str | None, options: Mapping[str, Any], configs: Sequence[Config]
) -> list[SlotMachine]:
    """Return the machines of this kind, the dotted path of a class that implements Machines; None: this machine.

    slots: of a machine that has no number of its own. options: of the class. configs: of the jobs. Raises InputError
    if a machine is not reached, or lacks devices for its slots. The caller closes the machines at the end.
    """
    if kind is None:
        if options:
            raise InputError(f"hydra.launcher.{next(iter(options))}: hydra/launcher=slots has no such key; try ssh")
        num_gpus = _count_gpus(configs)
        _check_slots("hydra.launcher.slots", slots, len(allowed_cores()), num_gpus)
        cores, gpus = divide(sorted(allowed_cores()), slots), divide(range(num_gpus), slots)
        return [SlotMachine(ThisMachine(), 0, cores, gpus)]
    try:
        make = locate_callable(kind)
        inspect.signature(make).bind("hydra.launcher", slots, **options)
    except ValueError as error:
        raise InputError(f"hydra.launcher.machines={kind}: {error}") from None
    except TypeError as error:
        raise InputError(f"hydra.launcher: {error}") from None
    try:
        machines: Machines = make("hydra.launcher", slots, **options)
    except ValueError as error:
        raise InputError(str(error)) from None
    only_cpu = all(as_backend(config.backend).device == "cpu" for config in configs)
    found = []
    try:
        outputs = Path(configs[0].outputs).absolute()
        for number, facts in enumerate(check_machines(machines, outputs, searched_dirs())):
            name, num = machines.machines[number]
            num_gpus = 0 if only_cpu else facts.num_gpus
            _check_slots(f"{machines.key}={name}: slots", num, len(facts.cores), num_gpus)
            warn_of_used_gpus(f"{machines.key}={name}", facts, num_gpus)
            cores, gpus = divide(facts.cores, num), divide(range(num_gpus), num)
            found.append(SlotMachine(machines, number, cores, gpus))
    except BaseException:
        machines.close()
        raise
    return found


def divide(devices: Sequence[int], slots: int) -> list[list[int]]:
    """Return the devices of each slot, equally many for each; the remainder is not used."""
    size = len(devices) // slots
    return [list(devices[slot * size : (slot + 1) * size]) for slot in range(slots)]


def _check_slots(key: str, slots: Any, num_cores: int, num_gpus: int) -> None:
    devices, kind = (num_gpus, "GPUs") if num_gpus else (num_cores, "CPU cores")
    if not isinstance(slots, int) or not 1 <= slots <= devices:
        raise InputError(
            f"{key}={slots} must be an integer from 1 to {devices}, the number of {kind} that jobs can use"
        )


def _count_gpus(configs: Sequence[Config]) -> int:
    """Return the number of GPUs on this machine; 0 if all jobs run on the CPU."""
    import torch

    if any(as_backend(config.backend).device_type() == "cuda" for config in configs):
        return torch.cuda.device_count()
    return 0
