"""A real Slurm for tests: a controller, two nodes and munge on this machine, on loopback and free ports."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import CompletedProcess

from commands import Commands, free_port

NEEDED = ("sbatch", "srun", "scontrol", "slurmctld", "slurmd", "munged", "mungekey")
CONF = """\
ClusterName=tests
SlurmctldHost=localhost(127.0.0.1)
AuthType=auth/munge
AuthInfo=socket={dir}/munge.socket,cred_expire=5
CredType=cred/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
ReturnToService=2
SlurmctldPidFile={dir}/slurmctld.pid
SlurmdPidFile={dir}/slurmd-%n.pid
SlurmdSpoolDir={dir}/spool-%n
SlurmUser=root
StateSaveLocation={dir}/state
SwitchType=switch/none
TaskPlugin=task/none
SlurmctldPort={ports[0]}
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=2,bf_interval=2
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmctldLogFile={dir}/slurmctld.log
SlurmdLogFile={dir}/slurmd-%n.log
JobAcctGatherType=jobacct_gather/none
JobRequeue=1
SlurmdParameters=config_overrides
KillWait=60
NodeName=n1 NodeHostname=localhost NodeAddr=127.0.0.1 Port={ports[1]} CPUs=8 State=UNKNOWN
NodeName=n2 NodeHostname=localhost NodeAddr=127.0.0.1 Port={ports[2]} CPUs=8 State=UNKNOWN
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=main Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=30
PartitionName=urgent Nodes=n1,n2 MaxTime=INFINITE State=UP PriorityTier=2 PreemptMode=off
"""


def missing_requirement() -> str | None:
    """Return why a cluster cannot be started here; None if it can."""
    if os.geteuid() != 0:
        return "needs root to start Slurm"
    missing = [name for name in NEEDED if shutil.which(name) is None]
    return f"needs Slurm and munge; missing: {', '.join(missing)}" if missing else None


@dataclass
class Cluster:
    """A cluster of the nodes n1 and n2, whose names do not resolve."""

    directory: Path
    daemons: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def env(self) -> dict[str, str]:
        return {"SLURM_CONF": str(self.directory / "slurm.conf")}

    def start(self) -> None:
        (self.directory / "state").mkdir()
        ports = [free_port() for _ in range(3)]
        (self.directory / "slurm.conf").write_text(CONF.format(dir=self.directory, ports=ports))
        key, socket = self.directory / "munge.key", self.directory / "munge.socket"
        subprocess.run(["mungekey", "--create", f"--keyfile={key}"], check=True, timeout=60)
        files = [f"--{name}-file={self.directory}/munge.{name}" for name in ("pid", "log", "seed")]
        self._daemon("munged", "--foreground", "--force", f"--key-file={key}", f"--socket={socket}", *files)
        self._wait(socket.exists)
        conf = str(self.directory / "slurm.conf")
        self._daemon("slurmctld", "-D", "-f", conf)
        for name in ("n1", "n2"):
            self._daemon("slurmd", "-D", "-N", name, "-f", conf)
        self._wait(lambda: self.call("sinfo", "-h", "-t", "idle", "-o", "%D").stdout.strip() == "2")

    def call(self, *command: str) -> CompletedProcess[str]:
        """Run a command of Slurm."""
        env = os.environ | self.env
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)

    def run(self, commands: Commands, *command: str) -> CompletedProcess[str]:
        """Run a command of Slurm that starts the runner, with this Python, on one thread and without GPUs."""
        command = tuple(sys.executable if argument == "python" else argument for argument in command)
        env = os.environ | self.env | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        return subprocess.run(
            command, env=env, cwd=commands.folder, capture_output=True, text=True, timeout=300, check=False
        )

    def state_of(self, job: str) -> str:
        return self.call("squeue", "-h", "-t", "all", "-j", job, "-o", "%T").stdout.strip()

    def wait_for(self, job: str, states: Sequence[str], timeout_s: float = 300) -> str:
        self._wait(lambda: self.state_of(job) in states, timeout_s)
        return self.state_of(job)

    def stop(self) -> None:
        """Cancel the jobs and terminate the daemons."""
        with suppress(AssertionError, subprocess.TimeoutExpired):
            self.call("scancel", "--user=root")
            self._wait(lambda: not self.call("squeue", "-h").stdout.strip(), timeout_s=60)
        for daemon in reversed(self.daemons):
            daemon.send_signal(signal.SIGTERM)
            try:
                daemon.wait(timeout=60)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait(timeout=60)

    def _daemon(self, *command: str) -> None:
        with (self.directory / "daemons.txt").open("ab") as log:
            self.daemons.append(subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | self.env))

    def _wait(self, condition: Callable[[], bool], timeout_s: float = 180) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, f"nothing after {timeout_s} s\n{self._logs()}"
            time.sleep(0.2)

    def _logs(self) -> str:
        return "\n".join(path.read_text()[-2000:] for path in self.directory.glob("*.log"))
