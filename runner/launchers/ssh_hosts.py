"""The machines on which agents run by the system's ssh: how they are named and reached."""

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import IO, Any

from runner.errors import InputError
from runner.launchers.agent import Assignment
from runner.launchers.agent_process import AgentProcess
from runner.launchers.host_facts import HostFacts, read_facts
from runner.launchers.machines import Machine, Machines

# ssh ends with LOST if it cannot connect, or after a while without a response to what it sends every ALIVE_S seconds.
LOST, CONNECT_S, ALIVE_S = 255, 6, 5
OPTIONS = (
    *("BatchMode=yes", f"ConnectTimeout={CONNECT_S}", f"ServerAliveInterval={ALIVE_S}", "ServerAliveCountMax=3"),
    *("ControlMaster=no", "ControlPath=none"),  # a shared connection would notice a lost machine by its own options
)
_OF_SSH = ("ssh: ", "Connection ", "Timeout, ", "client_loop: ", "Received disconnect ")  # beginnings of its messages
ANSWER_S = 30.0  # for the facts of a machine


class SshHosts(Machines):
    """The machines of a list of NAME or NAME:NUMBER, which ssh knows, with the working directory of this process.

    prefix: of the keys of the options, as launcher. num: the number of ranks or slots of a machine without a number.
    python: the path of Python there; None for that of this process. env: variables of the agents. options: of ssh.
    Raises ValueError.
    """

    silence_s = 30.0  # longer than ssh needs to notice that a machine is lost
    save_s = 30.0

    def __init__(
        self,
        prefix: str,
        num: int,
        hosts: Sequence[Any] = (),
        python: str | None = None,
        env: Mapping[str, Any] | None = None,
        options: Sequence[Any] = (),
    ):
        self.key = f"{prefix}.hosts"
        if not hosts:
            raise ValueError(f"{self.key}=[] must name machines; type {self.key}=[node1,node2]")
        self.machines = [_parse(self.key, str(text), num) for text in hosts]
        if len({machine.name for machine in self.machines}) < len(hosts):
            raise ValueError(f"{self.key}={list(map(str, hosts))}: name each machine once; NAME:4 uses it four times")
        self._python, self._env, self._options = python or sys.executable, dict(env or {}), list(map(str, options))

    def find_facts(self, number: int, shared: str) -> HostFacts | str:
        if shutil.which("ssh") is None:
            raise InputError(f"{self.key} needs the command ssh, which is not on this machine; install it")
        command = self._command(number, "host_facts", shared)
        try:
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=ANSWER_S, check=False
            )
        except subprocess.TimeoutExpired:
            return f"no response within {ANSWER_S:g} s"
        return read_facts(done.returncode, done.stdout, done.stderr)

    def start(
        self, number: int, assignment: Assignment, output: IO[bytes] | int, errors: IO[bytes] | int
    ) -> AgentProcess:
        return AgentProcess(assignment, output, errors, self._command(number, "agent"))

    def why_lost(self, number: int, status: int, output: str) -> str | None:
        """Return the last line of ssh itself in what it and the agent have written, if ssh has ended by itself."""
        if status != LOST and status >= 0:
            return None
        own = [line.strip() for line in output.splitlines() if line.startswith(_OF_SSH)]
        return own[-1] if own else f"ssh has ended with status {status}"

    def _command(self, number: int, module: str, *arguments: str) -> list[str]:
        """Return the command that runs a module of this package on a machine, in the working directory."""
        options = [word for option in OPTIONS for word in ("-o", option)]
        variables = [f"{name}={value}" for name, value in self._env.items()]
        words = ["env", *variables, self._python, "-m", f"runner.launchers.{module}", *arguments]
        script = f"cd {shlex.quote(os.getcwd())} && exec {shlex.join(words)}"
        # ssh uses the first one of equal options, so that those of the user precede.
        return ["ssh", "-T", *self._options, *options, "--", self.machines[number].name, script]


def _parse(key: str, text: str, num: int) -> Machine:
    name, _, number = text.partition(":")
    number = number or str(num)
    if not name or "/" in name or not number.isdigit() or int(number) < 1:
        raise ValueError(f"{key}: {text} must be NAME or NAME:4, as node1; write ports into ~/.ssh/config")
    return Machine(name, int(number))
