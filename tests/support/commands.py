"""The runner's commands as real processes, waited for no longer than they are told, and none left behind."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import CompletedProcess, Popen

import pytest

TORCHRUN = ("-m", "torch.distributed.run")  # what the script torchrun calls
WORLD = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
MARK = "RUNNER_TEST_COMMAND"  # all processes of a command inherit it, whatever group they move to


@dataclass
class Commands:
    """Starts commands in one folder."""

    folder: Path
    started: list[Popen[str]] = field(default_factory=list)
    marks: dict[int, str] = field(default_factory=dict)

    def start(self, *words: str, env: Mapping[str, str] | None = None) -> Popen[str]:
        """`python WORDS`: on the CPU, with one thread per process, in no world unless `env` says so."""
        return self.start_as([sys.executable, *words], env)

    def start_as(self, command: Sequence[str], env: Mapping[str, str] | None = None) -> Popen[str]:
        """As `start`, of any command."""
        mark = uuid.uuid4().hex
        outer = {name: value for name, value in os.environ.items() if name not in WORLD}
        own = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", MARK: mark, **(env or {})}
        process = Popen(
            command,
            cwd=self.folder,
            env={**outer, **own},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            process_group=0,  # a Ctrl-C of the tests is not one of the command
        )
        self.started.append(process)
        self.marks[process.pid] = mark
        return process

    def finish(self, process: Popen[str], timeout_s: float = 300) -> CompletedProcess[str]:
        """What the command said, and its status. One that outlasts the time is killed, and the test fails."""
        try:
            out, err = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            self.kill(process)
            out, err = process.communicate()
            pytest.fail(f"{process.args} still ran after {timeout_s} s\n{out}\n{err}")
        return CompletedProcess(process.args, process.returncode, out, err)

    def runner(self, *words: str, env: Mapping[str, str] | None = None) -> CompletedProcess[str]:
        """`python -m runner WORDS`, to its end."""
        return self.finish(self.start("-m", "runner", *words, env=env))

    def torchrun(self, num_ranks: int, *words: str, env: Mapping[str, str] | None = None) -> CompletedProcess[str]:
        """`torchrun --nproc-per-node NUM_RANKS -m runner WORDS`, to its end, on a port that was free."""
        where = (f"--nproc-per-node={num_ranks}", f"--master-port={free_port()}")
        return self.finish(self.start(*TORCHRUN, *where, "-m", "runner", *words, env=env))

    def by_hand(
        self, num_ranks: int, *words: str, delay_s: float, env: Mapping[str, str]
    ) -> list[CompletedProcess[str]]:
        """`RANK=r WORLD_SIZE=n … python -m runner WORDS`, the last rank first and each `delay_s` after the other."""
        world = {"WORLD_SIZE": str(num_ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), **env}
        processes: list[Popen[str]] = []
        for rank in reversed(range(num_ranks)):
            time.sleep(delay_s if processes else 0)
            processes.insert(0, self.start("-m", "runner", *words, env={**world, "RANK": str(rank)}))
        return [self.finish(process) for process in processes]

    @staticmethod
    def with_path(folder: Path) -> dict[str, str]:
        """The environment in which Python imports from the folder first, a sitecustomize.py as it starts."""
        return {"PYTHONPATH": os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))}

    def living(self, process: Popen[str]) -> list[int]:
        """The processes of the command that run, its ranks too, whoever their parent is by now."""
        wanted, found = f"{MARK}={self.marks[process.pid]}".encode(), []
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                if wanted in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
            except OSError:  # it has ended meanwhile, or is somebody else's
                continue
        return found

    def kill(self, process: Popen[str]) -> None:
        """All of its processes, at once."""
        for pid in self.living(process):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait(timeout=60)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def wait_until(condition: Callable[[], bool], process: Popen[str] | None = None, timeout_s: float = 180) -> None:
    """Return once the condition holds; fail the test when it does not in time, or when the process has ended."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if process is not None and process.poll() is not None:
            pytest.fail(f"ended with status {process.returncode}\n" + "".join(process.communicate()))
        assert time.monotonic() < deadline, f"nothing after {timeout_s} s"
        time.sleep(0.02)


def listening(pids: list[int]) -> list[str]:
    """The addresses on which these processes accept connections, in the hexadecimal of /proc/net/tcp, and the port."""
    inodes = set()
    for pid in pids:
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                inodes.add(entry.stat().st_ino)
    # sl, local address (hexadecimal, bytes reversed), remote address, state (0A listens), ..., inode at 9
    tables = [Path(f"/proc/net/{name}").read_text().splitlines()[1:] for name in ("tcp", "tcp6")]
    rows = [line.split() for lines in tables for line in lines]
    return [row[1] for row in rows if row[3] == "0A" and int(row[9]) in inodes]


def is_loopback(address: str) -> bool:
    host = address.partition(":")[0]
    return host == "0100007F" or host in ("0" * 16 + "FFFF00000100007F", "0" * 24 + "01000000")
