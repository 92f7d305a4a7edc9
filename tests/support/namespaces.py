"""Hosts on one machine: network namespaces, each with its address and name, connected by a bridge."""

import os
import re
import shutil
import signal
import subprocess
import sys
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import leftovers
from commands import MARK, Commands, wait_until


def why_not(*programs: str) -> str | None:
    """Return why network namespaces cannot be created here, or which of the programs is missing; None if neither."""
    if os.geteuid() != 0:
        return "needs root to create network namespaces"
    if missing := [name for name in ("ip", "unshare", *programs) if shutil.which(name) is None]:
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

    def serve_ssh(self, commands: Commands, host: int, folder: Path) -> "subprocess.Popen[str]":
        """Start an SSH server on the host, for `ssh -F FOLDER/config host<n>` as root. All its processes are marked."""
        folder.mkdir(exist_ok=True)
        for name in ("host_key", "key"):
            if not (folder / name).exists():
                _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name))
        (folder / "config").write_text(
            f"IdentityFile {folder / 'key'}\nIdentitiesOnly yes\nStrictHostKeyChecking no\nLogLevel ERROR\nUser root\n"
            "UserKnownHostsFile /dev/null\n"
            + "".join(f"Host host{n}\n  HostName {self.address(n)}\n" for n in range(1, self.number + 1))
        )
        Path("/run/sshd").mkdir(exist_ok=True)  # its directory for privilege separation
        marks = {leftovers.MARK: leftovers.mark.value, MARK: uuid.uuid4().hex}
        options = {
            "HostKey": folder / "host_key", "AuthorizedKeysFile": folder / "key.pub", "PidFile": "none",
            "ListenAddress": self.address(host), "StrictModes": "no", "UsePAM": "no", "PermitRootLogin": "yes",
            "AcceptEnv": "FAULT",
            "SetEnv": " ".join(f"{name}={value}" for name, value in marks.items()),
        }  # fmt: skip
        words = [word for name, value in options.items() for word in ("-o", f"{name}={value}")]
        command = [*self._inside(host), "/usr/sbin/sshd", "-D", "-e", "-f", "/dev/null", *words]
        process = commands.start_as(command, env=marks)
        commands.marks[process.pid] = marks[MARK]
        wait_until(lambda: self.accepts(host, 22), process)
        return process

    def accepts(self, host: int, port: int) -> bool:
        """Return True if a process listens on this port of the host."""
        tables = ("/proc/net/tcp", "/proc/net/tcp6")
        listing = ["ip", "netns", "exec", self._name(host), "cat", *tables]
        found = subprocess.run(listing, capture_output=True, text=True, check=True).stdout
        return re.search(rf":{port:04X} 0+:0000 0A", found) is not None

    def python(
        self, commands: Commands, host: int, *args: str, env: Mapping[str, str] | None = None
    ) -> "subprocess.Popen[str]":
        """Start `python ARGUMENTS` on the host, which cannot resolve other hosts' names."""
        return commands.start_as([*self._inside(host), sys.executable, *args], env)

    def runner(self, commands: Commands, host: int, *args: str) -> "subprocess.Popen[str]":
        """Start `python -m runner ARGUMENTS` on the host."""
        return self.python(commands, host, "-m", "runner", *args)

    def _inside(self, host: int) -> tuple[str, ...]:
        script = f'hostname host{host}; exec "$@"'
        return ("ip", "netns", "exec", self._name(host), "unshare", "--uts", "sh", "-c", script, "sh")

    def join(self, host: int) -> None:
        """Take the host's link up again."""
        _ip("-n", self._name(0), "link", "set", f"v{host}", "up")

    def cut(self, host: int) -> None:
        """Take the host's link down: packets are lost, and no connection is closed."""
        _ip("-n", self._name(0), "link", "set", f"v{host}", "down")

    def lose(self, host: int, commands: Commands, process: "subprocess.Popen[str]") -> None:
        """Simulate a power failure: kill the host's command without closing its connections to other hosts."""
        self.cut(host)
        self.kill(commands, process)

    def disconnect(self, host: int) -> None:
        """Kill the processes of the host's SSH server that serve connections, and not the commands that they run."""
        connections = {pid: Path(f"/proc/{pid}/cmdline") for pid in _processes(self._name(host))}
        _kill([pid for pid, path in connections.items() if path.read_bytes().startswith(b"sshd: root@")])

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
            # The processes of an SSH connection overwrite the environment that marks them.
            _kill(_processes(name))
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, timeout=120, check=False)

    def _network(self, host: int) -> None:
        _ip("netns", "add", self._name(host))
        self.made.append(self._name(host))
        _ip("-n", self._name(host), "link", "set", "lo", "up")

    def _name(self, host: int) -> str:
        return f"{self.bridge}-{host}"


def _processes(name: str) -> list[int]:
    """Return the processes in a network namespace."""
    listing = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, timeout=120, check=False)
    return [int(pid) for pid in listing.stdout.split()]


def _kill(pids: list[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _ip(*args: str) -> None:
    _run("ip", *args)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
