"""The runner's commands as real processes, waited for no longer than they are told, and none left behind."""

import contextlib
import itertools
import multiprocessing
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
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import CompletedProcess, Popen

import pytest

TORCHRUN = ("-m", "torch.distributed.run")  # what the script torchrun calls
WORLD = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_ports = itertools.count()
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

    def forked(self, *words: str, timeout_s: float = 300) -> CompletedProcess[str]:
        """As `runner`, in a fork of the tests' process: what a command does without the start of Python and torch.

        Its status is that of the entry, and warnings are errors in it.
        """
        out, err = (self.folder / f"{name}-{uuid.uuid4().hex}" for name in ("out", "err"))
        process = multiprocessing.get_context("fork").Process(target=_enter, args=(self.folder, words, out, err))
        with warnings.catch_warnings():  # as in ranks.py
            warnings.filterwarnings("ignore", ".*multi-threaded, use of fork", DeprecationWarning)
            process.start()
        process.join(timeout_s)
        said = [path.read_text() for path in (out, err)]
        for path in (out, err):
            path.unlink()
        if process.is_alive():
            process.kill()
            process.join()
            pytest.fail(f"{words} still ran after {timeout_s} s\n{said[0]}\n{said[1]}")
        assert process.exitcode is not None
        return CompletedProcess(words, process.exitcode, *said)

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


def _enter(folder: Path, words: Sequence[str], out: Path, err: Path) -> None:
    import torch

    from runner.main import main

    for path, number, name in ((out, 1, "stdout"), (err, 2, "stderr")):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, number)
        setattr(sys, name, open(number, "w", closefd=False, buffering=1))  # noqa: SIM115
    for name in WORLD:
        os.environ.pop(name, None)
    os.environ.update(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")
    torch.set_num_threads(1)
    os.chdir(folder)
    sys.argv = ["runner", *words]
    sys.orig_argv = [sys.executable, "-m", "runner", *words]
    status = 1
    try:
        status = main()
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)  # at once: no handler that the tests' process had registered runs here


def free_port() -> int:
    """Never the same twice, nor that of another worker, nor what the system gives to a connection meanwhile."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    for number in itertools.islice(_ports, 1000):
        port = 20_000 + 1000 * (worker % 8) + (13 * os.getpid() + number) % 1000
        with contextlib.suppress(OSError), socket.create_server(("", port)):
            return port
    raise OSError("no port from 20000 to 28000 is free")


def wait_until(condition: Callable[[], bool], process: Popen[str] | None = None, timeout_s: float = 180) -> None:
    """Return once the condition holds; fail the test when it does not in time, or when the process has ended."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if process is not None and process.poll() is not None:
            pytest.fail(f"ended with status {process.returncode}\n" + "".join(process.communicate()))
        assert time.monotonic() < deadline, f"nothing after {timeout_s} s"
        time.sleep(0.02)


def newest_step(folder: Path) -> int:
    """Of the complete checkpoints of the runs that commands started in the folder; 0 for none."""
    found = (folder / "outputs" / "run").glob("*/checkpoints/step_*")
    return max((int(path.name[5:]) for path in found if path.name[5:].isdigit()), default=0)


def parent_of(pid: int) -> int | None:
    """None where it has ended."""
    try:
        return int(_stat(pid)[1])
    except OSError:
        return None


def by_age(pid: int) -> tuple[int, int]:
    """What a later process has more of: its number alone may begin anew."""
    return int(_stat(pid)[19]), pid


def _stat(pid: int) -> list[str]:
    """The words from the state on, which is the third field of proc(5)."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def sockets_of(pid: int) -> set[int]:
    """The inodes of a process's sockets."""
    found = set()
    for entry in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile
            if (link := os.readlink(f"/proc/{pid}/fd/{entry}")).startswith("socket:["):
                found.add(int(link[8:-1]))
    return found


def listening(pids: list[int]) -> list[str]:
    """The addresses on which these processes accept connections, in the hexadecimal of /proc/net/tcp, and the port."""
    return accepting({inode for pid in pids for inode in sockets_of(pid)})


def accepting(sockets: Collection[int]) -> list[str]:
    """As `listening`, of these sockets."""
    # sl, local address (hexadecimal, bytes reversed), remote address, state (0A listens), ..., inode at 9
    tables = [Path(f"/proc/net/{name}").read_text().splitlines()[1:] for name in ("tcp", "tcp6")]
    rows = [line.split() for lines in tables for line in lines]
    return [row[1] for row in rows if row[3] == "0A" and int(row[9]) in sockets]


def is_loopback(address: str) -> bool:
    host = address.partition(":")[0]
    return host == "0100007F" or host in ("0" * 16 + "FFFF00000100007F", "0" * 24 + "01000000")
