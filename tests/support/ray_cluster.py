"""A Ray cluster whose nodes are hosts in network namespaces. Commands are typed on its head, which has no CPUs."""

import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import Popen

import leftovers
from commands import Commands, wait_until
from namespaces import Hosts

HEAD, PORT = 1, 6379
# A node without a response counts as lost after about 9 s instead of 65 s.
HEALTH = {"initial_delay_ms": 1000, "period_ms": 1000, "timeout_ms": 2000, "failure_threshold": 3}
ENV = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    **{f"RAY_health_check_{name}": str(value) for name, value in HEALTH.items()},
}
WAIT = """
import sys, time, ray
ray.init(sys.argv[1], logging_level="ERROR")
wanted = 2 * int(sys.argv[2])
while not wanted == ray.cluster_resources().get("CPU") == ray.available_resources().get("CPU"):
    time.sleep(0.2)
"""


@dataclass
class RayCluster:
    """A head and `num` nodes, which are the hosts from 2, with 2 CPUs each. commands: starts Ray's own processes."""

    commands: Commands
    num: int
    hosts: Hosts = field(init=False)
    nodes: dict[int, Popen[str]] = field(default_factory=dict)  # by host
    temporary: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="ray", dir="/tmp")))  # a short path

    def __post_init__(self) -> None:
        self.hosts = Hosts(self.num + 1)

    @property
    def address(self) -> str:
        return f"{self.hosts.address(HEAD)}:{PORT}"

    def start(self) -> None:
        self.hosts.start()
        self._start(HEAD, "--head", f"--port={PORT}", "--num-cpus=0", "--include-dashboard=false")
        wait_until(lambda: self.hosts.accepts(HEAD, PORT), self.nodes[HEAD])

    def restore(self) -> None:
        """Start the missing nodes, and wait until Ray has recognized the state of all, with nothing reserved."""
        waiting = self.hosts.python(self.commands, HEAD, "-c", WAIT, self.address, str(self.num), env=ENV)

        def is_complete() -> bool:
            for host in range(2, self.num + 2):  # on a loaded machine, Ray may give up while a node starts
                if host not in self.nodes or self.nodes[host].poll() is not None:
                    self._start(host, f"--address={self.address}", "--num-cpus=2")
            return waiting.poll() is not None

        wait_until(is_complete)
        done = self.commands.finish(waiting)
        assert done.returncode == 0, done.stderr

    def lose(self, host: int) -> None:
        """Kill all processes of a node."""
        self.hosts.kill(self.commands, self.nodes[host])

    def runner(self, commands: Commands, *args: str) -> Popen[str]:
        """Start `python -m runner ARGUMENTS` on the head. The address auto is that of the cluster."""
        return self.hosts.python(commands, HEAD, "-m", "runner", *args, env={**ENV, "RAY_ADDRESS": self.address})

    def busy(self) -> list[str]:
        """Return the command lines of jobs and actors on the nodes, without Ray's own processes."""
        lines = [
            (Path("/proc") / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            for node in self.nodes.values()
            for pid in self.commands.living(node)
        ]
        return [
            line for line in lines if any(word in line for word in ("-m runner.", "multiprocessing.", "ray::Starter"))
        ]

    def stop(self) -> None:
        self.commands.close()
        self.hosts.stop()
        shutil.rmtree(self.temporary)

    def _start(self, host: int, *options: str) -> None:
        folder = self.temporary / str(host)  # of its own, because hosts do not share one in reality
        words = (
            f"--node-ip-address={self.hosts.address(host)}", f"--temp-dir={folder}", "--object-store-memory=100000000",
            "--disable-usage-stats", "--block",
        )  # fmt: skip
        self.nodes[host] = self.hosts.python(
            self.commands,
            host,
            "-m",
            "ray.scripts.scripts",
            "start",
            *options,
            *words,
            env={**ENV, leftovers.MARK: leftovers.wide},
        )
