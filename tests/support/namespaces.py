"""Hosts on one machine: network namespaces, each with its address and name, connected by a bridge."""

import os
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from commands import Commands


def why_not() -> str | None:
    """Return why network namespaces cannot be created here; None if they can."""
    if os.geteuid() != 0:
        return "needs root to create network namespaces"
    if missing := [name for name in ("ip", "unshare") if shutil.which(name) is None]:
        return f"needs {', '.join(missing)}"
    done = subprocess.run(["unshare", "--net", "true"], capture_output=True, text=True, timeout=120, check=False)
    return f"network namespaces cannot be created: {done.stderr.strip()}" if done.returncode else None


@dataclass
class Hosts:
    """Host number n is named host<n> and has the address 10.213.7.<n>, from 1."""

    number: int
    made: list[str] = field(default_factory=list)

    @property
    def bridge(self) -> str:
        return f"rt{os.getpid() % 100_000}"

    @staticmethod
    def address(host: int) -> str:
        return f"10.213.7.{host}"

    def start(self) -> None:
        self._network(0)
        _ip("-n", self._name(0), "link", "add", self.bridge, "type", "bridge")
        _ip("-n", self._name(0), "link", "set", self.bridge, "up")
        for host in range(1, self.number + 1):
            self._network(host)
            inner, outer = self._name(host), f"v{host}"
            _ip("-n", self._name(0), "link", "add", outer, "type", "veth", "peer", "name", "eth0", "netns", inner)
            _ip("-n", self._name(0), "link", "set", outer, "master", self.bridge, "up")
            _ip("-n", inner, "address", "add", f"{self.address(host)}/24", "dev", "eth0")
            _ip("-n", inner, "link", "set", "eth0", "up")

    def runner(self, commands: Commands, host: int, *args: str) -> "subprocess.Popen[str]":
        """Start `python -m runner ARGUMENTS` on the host, which cannot resolve other hosts' names."""
        inside = ("ip", "netns", "exec", self._name(host), "unshare", "--uts", "sh", "-c")
        script = f'hostname host{host}; exec "$@"'
        return commands.start_as([*inside, script, "sh", sys.executable, "-m", "runner", *args])

    def cut(self, host: int) -> None:
        """Take the host's link down: packets are lost, and no connection is closed."""
        _ip("-n", self._name(0), "link", "set", f"v{host}", "down")

    def lose(self, host: int, commands: Commands, process: "subprocess.Popen[str]") -> None:
        """Simulate a power failure: kill the host's command without closing its connections to other hosts."""
        self.cut(host)
        self.kill(commands, process)

    @staticmethod
    def kill(commands: Commands, process: "subprocess.Popen[str]") -> None:
        """Kill all processes of a host's command at once, except the resource tracker.

        All are stopped first, so that none reacts to the death of another. The resource tracker removes the files in
        /dev/shm, which a restarted host would have lost.
        """
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in commands.living(process):
                with suppress(ProcessLookupError, FileNotFoundError):
                    if b"resource_tracker" not in Path(f"/proc/{pid}/cmdline").read_bytes():
                        os.kill(pid, number)
        process.wait(timeout=60)

    def stop(self) -> None:
        for name in reversed(self.made):
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, timeout=120, check=False)

    def _network(self, host: int) -> None:
        _ip("netns", "add", self._name(host))
        self.made.append(self._name(host))
        _ip("-n", self._name(host), "link", "set", "lo", "up")

    def _name(self, host: int) -> str:
        return f"{self.bridge}-{host}"


def _ip(*args: str) -> None:
    done = subprocess.run(["ip", *args], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, f"ip {' '.join(args)}: {done.stderr}"
