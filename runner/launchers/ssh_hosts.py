"""The machines on which agents run by the system's ssh: how they are named, checked and reached."""

import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

from runner.distributed.failures.signals import Stopped, handling_signals, interruptible
from runner.errors import InputError, Preempted
from runner.launchers.agent import Assignment
from runner.launchers.agent_handle import AgentHandle
from runner.launchers.host_facts import HostFacts, find_facts

# ssh ends with LOST if it cannot connect, or after a while without a response to what it sends every ALIVE_S seconds.
LOST, CONNECT_S, ALIVE_S = 255, 8, 5
OPTIONS = (
    *("BatchMode=yes", f"ConnectTimeout={CONNECT_S}", f"ServerAliveInterval={ALIVE_S}", "ServerAliveCountMax=3"),
    *("ControlMaster=no", "ControlPath=none"),  # a shared connection would notice a lost machine by its own options
)
_OF_SSH = ("ssh: ", "Connection ", "Timeout, ", "client_loop: ", "Received disconnect ")  # beginnings of its messages
ANSWER_S = 30.0  # for the facts of a machine
SILENCE_S = 30.0  # after which an agent without a message from here saves and exits; longer than ssh needs to notice it
SAVE_S = 30.0


class Host(NamedTuple):
    """A machine by the name that ssh knows, and its number of ranks or slots."""

    name: str
    num: int


@dataclass(frozen=True)
class SshHosts:
    """The machines, and how Python starts on them. key: the key of the launcher's options, for messages."""

    key: str
    hosts: Sequence[Host]
    python: str | None  # None for that of this process
    env: Mapping[str, Any]
    options: Sequence[str]  # of ssh

    def check(self, outputs: Path) -> list[HostFacts]:
        """Return the facts of the machines. Raise InputError, which names what is wrong on each of them."""
        if shutil.which("ssh") is None:
            raise InputError(f"{self.key}.hosts needs the command ssh, which is not on this machine; install it")
        existing = next(each for each in (outputs, *outputs.parents) if each.is_dir())
        with _until_stopped(), tempfile.NamedTemporaryFile(dir=existing, prefix=".shared-") as shared:
            own = find_facts(Path(shared.name))
            with ThreadPoolExecutor(len(self.hosts)) as pool:
                found = [*pool.map(lambda host: self._find_facts(host, shared.name), self.hosts)]
        facts, messages = list[HostFacts](), list[str]()
        for host, each in zip(self.hosts, found, strict=True):
            if isinstance(each, HostFacts):
                facts.append(each)
                each = "; ".join(_differences(each, own, outputs))
            if each:
                messages.append(f"{self.key}.hosts={host.name}: {each}")
        if messages:
            raise InputError(*messages)
        return facts

    def start(
        self, host: Host, assignment: Assignment, output: IO[bytes] | int, errors: IO[bytes] | int
    ) -> AgentHandle:
        """Start the agent of an assignment on a machine. Arguments are those of AgentHandle."""
        return AgentHandle(assignment, output, errors, self._command(host, "agent"))

    def _find_facts(self, host: Host, shared: str) -> HostFacts | str:
        """Return the facts of a machine, or why there are none."""
        command = self._command(host, "host_facts", shared)
        try:
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=ANSWER_S, check=False
            )
        except subprocess.TimeoutExpired:
            return f"no response within {ANSWER_S:g} s"
        if done.returncode:
            return _last_line(done.stderr)
        try:
            return HostFacts(**json.loads(_last_line(done.stdout)))
        except (TypeError, ValueError):  # another version of the runner, or a message of a login script
            return f"unexpected answer: {_last_line(done.stdout)}"

    def _command(self, host: Host, module: str, *arguments: str) -> list[str]:
        """Return the command that runs a module of this package on a machine, in the working directory."""
        options = [word for option in OPTIONS for word in ("-o", option)]
        variables = [f"{name}={value}" for name, value in self.env.items()]
        words = ["env", *variables, self.python or sys.executable, "-m", f"runner.launchers.{module}", *arguments]
        script = f"cd {shlex.quote(os.getcwd())} && exec {shlex.join(words)}"
        # ssh uses the first one of equal options, so that those of the user precede.
        return ["ssh", "-T", *map(str, self.options), *options, "--", host.name, script]


@contextmanager
def _until_stopped() -> Iterator[None]:
    """Raise Preempted in the context at a signal, at which this process would otherwise exit at once."""
    try:
        with handling_signals(), interruptible():
            yield
    except Stopped as error:
        raise Preempted(str(error)) from None


def parse_hosts(key: str, texts: Sequence[Any], num: int) -> list[Host]:
    """Return the machines of a list of NAME or NAME:NUMBER. num: the number of the others. Raise ValueError."""
    hosts = [_parse(key, str(text), num) for text in texts]
    if len({host.name for host in hosts}) < len(hosts):
        raise ValueError(f"{key}.hosts={list(map(str, texts))}: name each machine once; NAME:4 uses it four times")
    return hosts


def is_lost(status: int) -> bool:
    """Return True if this exit status of ssh means that the machine is lost, not that its agent has ended."""
    return status == LOST or status < 0


def why_lost(output: str) -> str:
    """Return the last line of ssh itself in what it and the agent have written."""
    own = [line.strip() for line in output.splitlines() if line.startswith(_OF_SSH)]
    return own[-1] if own else f"ssh has ended with status {LOST}"


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "no response"


def _parse(key: str, text: str, num: int) -> Host:
    name, _, number = text.partition(":")
    number = number or str(num)
    if not name or "/" in name or not number.isdigit() or int(number) < 1:
        raise ValueError(f"{key}.hosts: {text} must be NAME or NAME:4, as node1; write ports into ~/.ssh/config")
    return Host(name, int(number))


def _differences(facts: HostFacts, own: HostFacts, outputs: Path) -> list[str]:
    """Return what keeps the machine from running ranks of this command."""
    found = [
        f"{package} {facts.versions.get(package)}, but {version} here"
        for package, version in own.versions.items()
        if version != facts.versions.get(package)
    ]
    if facts.code != own.code and not found:
        found.append("another state of the runner's code than here")
    if not facts.sees_file:
        found.append(f"does not see the files in {outputs}; set outputs= to a shared directory")
    return found
