"""The contract of machines on which agents (runner.launchers.agent) run, for single runs and for sweeps."""

import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO, ClassVar, NamedTuple, Protocol

from runner.distributed.failures.signals import Stopped, handling_signals, interruptible
from runner.errors import InputError, Preempted, print_messages
from runner.launchers.agent import Assignment
from runner.launchers.host_facts import HostFacts, write_hashes
from runner.process.daemon_thread import call_in_daemon
from runner.records.custom_code import shipped_hash
from runner.records.frozen_code import code_files
from runner.records.provenance import versions


class Machine(NamedTuple):
    """A machine by its name, for messages and files, and its number of ranks or slots."""

    name: str
    num: int


class Agent(Protocol):
    """A started agent. It ends when this process closes it or dies."""

    @property
    def status(self) -> int | None:
        """The exit status; None while the agent runs."""

    def send_signal(self, number: int) -> None:
        """Send this signal to the job."""

    def close(self) -> None:
        """Let the agent end. An agent that has exited needs it, too."""

    def kill(self) -> None:
        """Remove what is left of the agent, as far as this process reaches it."""


class Machines(ABC):
    """How agents are started on machines of one kind, and how the loss of a machine is recognized.

    Attributes:
        key: The key of the options, for messages, as launcher.hosts.
        machines: The machines, whose position is the `number` of the methods.
        silence_s, save_s: As in Assignment.
    """

    key: str
    machines: Sequence[Machine]
    silence_s: ClassVar[float | None] = None
    save_s: ClassVar[float] = 0.0

    @property
    def end_s(self) -> float:
        """The seconds after which no process of a lost agent is running."""
        return (self.silence_s or 0.0) + self.save_s

    def reserve(self) -> None:  # noqa: B027
        """Reserve the machines, if a scheduler assigns them. Called before the other methods. Raises InputError."""

    def close(self) -> None:  # noqa: B027
        """Release the machines that `reserve` has reserved. Called last, also if `reserve` or a check has failed."""

    @abstractmethod
    def find_facts(self, number: int, shared: str) -> HostFacts | str:
        """Return what runner.launchers.host_facts finds there for the file `shared`, or why there is no answer."""

    @abstractmethod
    def start(self, number: int, assignment: Assignment, output: IO[bytes] | int, errors: IO[bytes] | int) -> Agent:
        """Start the agent of an assignment. output, errors: files, or constants of subprocess."""

    @abstractmethod
    def why_lost(self, number: int, status: int, output: str) -> str | None:
        """Return why the machine is lost, given the end of an agent; None if the agent has ended by itself."""


def check_machines(machines: Machines, outputs: Path, config_dirs: Sequence[str]) -> list[HostFacts]:
    """Return the facts of the machines. Raise InputError, which names what is wrong on each of them."""
    existing = next(each for each in (outputs, *outputs.parents) if each.is_dir())
    with _until_stopped(), tempfile.NamedTemporaryFile(dir=existing, prefix=".shared-") as shared:
        write_hashes(Path(shared.name), code_files(config_dirs))
        machines.reserve()
        found = _find_all_facts(machines, shared.name)
    facts, messages = list[HostFacts](), list[str]()
    own_versions, own_code = versions(), shipped_hash()
    for machine, each in zip(machines.machines, found, strict=True):
        if isinstance(each, HostFacts):
            facts.append(each)
            each = "; ".join(_differences(each, own_versions, own_code))
        if each:
            messages.append(f"{machines.key}={machine.name}: {each}")
    if messages:
        raise InputError(*messages)
    return facts


def warn_of_used_gpus(key: str, facts: HostFacts, num_gpus: int) -> None:
    """Print which of the first `num_gpus` GPUs of a machine are in use, and continue: the use may be about to end."""
    if used := [text for text in facts.used_gpus[:num_gpus] if text]:
        print_messages([f"warning: {key}: in use by other processes: {', '.join(used)}"])


def _find_all_facts(machines: Machines, shared: str) -> list[HostFacts | str]:
    """Return the facts of all machines, or why there are none. The threads are daemons, which delay no exit."""
    finds = [partial(machines.find_facts, number, shared) for number in range(len(machines.machines))]
    futures = [call_in_daemon(find, "facts") for find in finds]
    return [future.result() for future in futures]


@contextmanager
def _until_stopped() -> Iterator[None]:
    """Raise Preempted in the context at a signal, at which this process would otherwise exit at once."""
    try:
        with handling_signals(), interruptible():
            yield
    except Stopped as error:
        raise Preempted(str(error)) from None


def _differences(facts: HostFacts, own_versions: Mapping[str, str], own_code: str) -> list[str]:
    """Return what keeps the machine from running ranks of this command."""
    found = [
        f"{package} {facts.versions.get(package)}, but {version} here"
        for package, version in own_versions.items()
        if version != facts.versions.get(package)
    ]
    if facts.code != own_code and not found:
        found.append("another state of the runner's code than here")
    return found + facts.problems
