"""The runner's commands as real processes, with time limits; no process is left behind."""

import contextlib
import itertools
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
import uuid
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import forkserver
from pathlib import Path
from subprocess import CompletedProcess, Popen

import pytest

TORCHRUN = ("-m", "torch.distributed.run")  # what the script torchrun calls
WORLD = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_ports = itertools.count()
MARK = "RUNNER_TEST_COMMAND"  # all processes of a command inherit it, whatever group they move to


@dataclass
class Commands:
    """Starts commands in one directory."""

    folder: Path
    started: list[Popen[str]] = field(default_factory=list)
    marks: dict[int, str] = field(default_factory=dict)

    def start(self, *arguments: str, env: Mapping[str, str] | None = None) -> Popen[str]:
        """Start `python ARGUMENTS` on the CPU, with one thread per process, and in no world unless `env` sets one."""
        return self.start_as([sys.executable, *arguments], env)

    def start_as(self, command: Sequence[str], env: Mapping[str, str] | None = None) -> Popen[str]:
        """Start any command; otherwise as `start`."""
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
            process_group=0,  # Ctrl-C in the tests must not reach the command
        )
        self.started.append(process)
        self.marks[process.pid] = mark
        return process

    def finish(self, process: Popen[str], timeout_s: float = 300) -> CompletedProcess[str]:
        """Return the output and status of the command. Kill it and fail the test if it exceeds the time limit."""
        try:
            out, err = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            self.kill(process)
            out, err = process.communicate()
            pytest.fail(f"{process.args} still ran after {timeout_s} s\n{out}\n{err}")
        return CompletedProcess(process.args, process.returncode, out, err)

    def runner(self, *arguments: str, env: Mapping[str, str] | None = None) -> CompletedProcess[str]:
        """Run `python -m runner ARGUMENTS`."""
        return self.finish(self.start("-m", "runner", *arguments, env=env))

    def fork(
        self, *arguments: str, env: Mapping[str, str] | None = None, prepare: Callable[[], object] = int
    ) -> Popen[str]:
        """Start `runner ARGUMENTS` in a fork of the tests' process, which saves the start of Python and torch.

        Warnings are errors in it. prepare: called in the fork, before the command.
        """
        mark = uuid.uuid4().hex
        own = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", MARK: mark, **(env or {})}
        kept = os.listdir("/proc/self/fd")
        with warnings.catch_warnings():  # as in ranks.py
            warnings.filterwarnings("ignore", ".*multi-threaded, use of fork", DeprecationWarning)
            process = Popen(
                [sys.executable],  # is not executed, because preexec_fn does not return
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                process_group=0,
                restore_signals=False,  # Python has set them
                preexec_fn=lambda: _enter(arguments, own, kept, prepare),
            )
        self.started.append(process)
        self.marks[process.pid] = mark
        return process

    def forked(
        self,
        *arguments: str,
        env: Mapping[str, str] | None = None,
        timeout_s: float = 300,
        prepare: Callable[[], object] = int,
    ) -> CompletedProcess[str]:
        """Run `runner ARGUMENTS` as `fork` starts it."""
        return self.finish(self.fork(*arguments, env=env, prepare=prepare), timeout_s)

    def forked_world(self, num_ranks: int, *arguments: str) -> list[CompletedProcess[str]]:
        """Run `runner ARGUMENTS` as the ranks of one world, as torchrun does, each as `forked`. Return them by rank."""
        size = str(num_ranks)
        world = {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1"}
        world["MASTER_PORT"] = str(free_port())
        ranks = [
            self.fork(*arguments, env={**world, "RANK": str(rank), "LOCAL_RANK": str(rank)})
            for rank in range(num_ranks)
        ]
        with ThreadPoolExecutor(num_ranks) as pool:
            return [*pool.map(self.finish, ranks)]

    def torchrun(self, num_ranks: int, *arguments: str, env: Mapping[str, str] | None = None) -> CompletedProcess[str]:
        """Run `torchrun --nproc-per-node NUM_RANKS -m runner ARGUMENTS` on a free port."""
        where = (f"--nproc-per-node={num_ranks}", f"--master-port={free_port()}")
        return self.finish(self.start(*TORCHRUN, *where, "-m", "runner", *arguments, env=env))

    @staticmethod
    def with_path(folder: Path) -> dict[str, str]:
        """Return an environment in which Python imports from the directory first, including a sitecustomize.py."""
        return {"PYTHONPATH": os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))}

    def living(self, process: Popen[str]) -> list[int]:
        """Return the running processes of the command, including ranks whose parent has died."""
        # A forked command has the environment of the tests' process.
        forked = [process.pid] if process.poll() is None else []
        return sorted({*with_variable(MARK, self.marks[process.pid]), *forked})

    def close(self) -> None:
        """Kill the commands that are running. The leftovers of an exited one fail the test: support/leftovers.py."""
        for process in self.started:
            if process.poll() is None:
                self.kill(process)
            assert process.stdout and process.stderr
            process.stdout.close()
            process.stderr.close()

    def kill(self, process: Popen[str]) -> None:
        """Kill all processes of the command with SIGKILL."""
        for pid in self.living(process):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait(timeout=60)


def _enter(
    arguments: Sequence[str], env: Mapping[str, str], kept: Collection[str], prepare: Callable[[], object]
) -> None:
    """Run a command in a fork of the tests' process, and end it. Its standard streams and directory are set.

    Popen waits until the command has closed a pipe, which executed programs do. It is not one of the `kept` files.
    """
    import torch

    from runner.cli import main

    for number in {*map(int, os.listdir("/proc/self/fd"))} - {*map(int, kept), 0, 1, 2}:
        with contextlib.suppress(OSError):  # the directory itself
            os.close(number)
    for number, name in ((0, "stdin"), (1, "stdout"), (2, "stderr")):
        setattr(sys, name, open(number, "w" if number else "r", closefd=False, buffering=1))  # noqa: SIM115
    for name in WORLD:
        os.environ.pop(name, None)
    os.environ.update(env)
    torch.set_num_threads(1)
    # multiprocessing cannot wait for the fork server of an earlier test, which is not a child of this process.
    forkserver._forkserver.__init__()  # type: ignore[attr-defined]
    sys.argv = ["runner", *arguments]
    sys.orig_argv = [sys.executable, "-m", "runner", *arguments]
    status = 1
    try:
        prepare()
        status = main()
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)  # skips the exit handlers that the tests' process has registered


def free_port() -> int:
    """Return a new port on each call, outside of those of other workers and of the system's ephemeral ports."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    for number in itertools.islice(_ports, 1000):
        port = 20_000 + 1000 * (worker % 8) + (13 * os.getpid() + number) % 1000
        with contextlib.suppress(OSError), socket.create_server(("", port)):
            return port
    raise OSError("no port from 20000 to 28000 is free")


def with_variable(name: str, value: str) -> list[int]:
    """Return the running processes whose initial environment has this variable."""
    wanted, found = f"{name}={value}".encode(), []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has exited, or belongs to another user
            if wanted in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
    return found


def wait_until(condition: Callable[[], bool], process: Popen[str] | None = None, timeout_s: float = 180) -> None:
    """Wait for the condition. Fail the test after `timeout_s`, or if the process exits."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if process is not None and process.poll() is not None:
            pytest.fail(f"ended with status {process.returncode}\n" + "".join(process.communicate()))
        assert time.monotonic() < deadline, f"nothing after {timeout_s} s"
        time.sleep(0.05)


def newest_step(folder: Path) -> int:
    """Return the newest step of the complete checkpoints in this directory's runs; 0 if there is none."""
    found = (folder / "outputs" / "run").glob("*/checkpoints/step_*")
    return max((int(path.name[5:]) for path in found if path.name[5:].isdigit()), default=0)


def parent_of(pid: int) -> int | None:
    """Return the process id of the parent; None if the process has exited."""
    try:
        return int(_stat(pid)[1])
    except OSError:
        return None


def ranks_of(commands: Commands, process: Popen[str]) -> list[int]:
    """Return the ranks' processes of a command, the youngest last."""
    return ranks_under(process.pid, commands.living(process))


def ranks_under(agent: int, processes: Collection[int]) -> list[int]:
    """Return the ranks among these processes, the youngest last: the children of the agent's fork server."""
    parents = {pid: parent for pid in processes if (parent := parent_of(pid)) is not None}
    servers = [pid for pid, parent in parents.items() if parent == agent and pid in parents.values()]
    return sorted((pid for pid, parent in parents.items() if parent in servers), key=by_age)


def youngest_rank(processes: Collection[int], *agent: str) -> int:
    """Return the rank that was started last by the agent `python -m AGENT...` among these processes."""
    commands = {pid: Path(f"/proc/{pid}/cmdline").read_text().split("\0")[1:] for pid in processes}
    (found,) = [pid for pid, words in commands.items() if words[: 1 + len(agent)] == ["-m", *agent]]
    return ranks_under(found, processes)[-1]


def by_age(pid: int) -> tuple[int, int]:
    """Return a sort key by start time. Process ids alone may wrap around."""
    return int(_stat(pid)[19]), pid


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the third one on, which is the state (proc(5))."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def sockets_of(pid: int) -> set[int]:
    """Return the inodes of a process's sockets."""
    found = set()
    for entry in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile
            if (link := os.readlink(f"/proc/{pid}/fd/{entry}")).startswith("socket:["):
                found.add(int(link[8:-1]))
    return found


def listening(pids: list[int]) -> list[str]:
    """Return the addresses and ports on which these processes listen, in the hexadecimal of /proc/net/tcp."""
    return accepting({inode for pid in pids for inode in sockets_of(pid)})


def accepting(sockets: Collection[int]) -> list[str]:
    """Return the addresses and ports of the listening sockets among these; otherwise as `listening`."""
    # sl, local address (hexadecimal, bytes reversed), remote address, state (0A listens), ..., inode at 9
    tables = [Path(f"/proc/net/{name}").read_text().splitlines()[1:] for name in ("tcp", "tcp6")]
    rows = [line.split() for lines in tables for line in lines]
    return [row[1] for row in rows if row[3] == "0A" and int(row[9]) in sockets]


def is_loopback(address: str) -> bool:
    host = address.partition(":")[0]
    return host == "0100007F" or host in ("0" * 16 + "FFFF00000100007F", "0" * 24 + "01000000")
