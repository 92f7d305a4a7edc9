"""A plugin that fails a test that leaves processes, listening sockets, shared memory or partial checkpoints behind.

Several workers and other programs run at the same time. So each test marks its processes: executed ones with a variable
in the environment, forked ones with an open file.
"""

import contextlib
import ctypes
import gc
import os
import signal
import time
import uuid
from collections.abc import Iterator
from multiprocessing import forkserver, resource_tracker
from pathlib import Path

import pytest
from commands import accepting, listening, sockets_of

MARK = "RUNNER_TEST"
WAIT_S = 60.0  # time for processes to exit after their parent, on a loaded machine
SHARED = Path("/dev/shm")


class Mark:
    """The mark of the running test, or of fixtures that outlive a test."""

    def __init__(self) -> None:
        self.number: int | None = None  # the descriptor of an open file whose name is the mark; forks inherit it
        self.value = ""

    def set(self, value: str) -> None:
        self.value = os.environ[MARK] = value
        file = os.memfd_create(value)
        if self.number is None:
            self.number = os.dup(file)
        else:
            os.dup2(file, self.number, inheritable=False)
        os.close(file)

    def marks(self, pid: int, value: str) -> bool:
        """Return True if the process was started under the mark `value`, directly or indirectly."""
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/{pid}/fd/{self.number}") == f"/memfd:{value} (deleted)":
                return True
        try:
            return f"{MARK}={value}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:  # it has exited, or belongs to another user
            return False


mark = Mark()
wide = uuid.uuid4().hex  # the mark of the running module's fixtures


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(os, "memfd_create"):  # Linux
        config.pluginmanager.register(Leftovers(), "leftovers of tests")


class Leftovers:
    """Compares processes, sockets and shared memory before and after each test."""

    def __init__(self) -> None:
        self.pids: set[int] = set()
        self.sockets: set[int] = set()
        self.shared: set[str] = set()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Iterator[None]:
        if not mark.value:
            own_shared_memory()
        mark.set(uuid.uuid4().hex)
        self.pids, self.sockets, self.shared = running(), sockets_of(os.getpid()), shared_memory()
        yield

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[object]) -> Iterator[object]:
        """Let what a module's fixture starts live until the end of the module."""
        if fixturedef.scope == "function":
            return (yield)
        own = mark.value
        sockets, shared = sockets_of(os.getpid()), shared_memory()
        mark.set(wide)
        try:
            return (yield)
        finally:
            mark.set(own)
            self.sockets |= sockets_of(os.getpid()) - sockets
            self.shared |= shared_memory() - shared

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(self, item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
        yield
        is_last = nextitem is None or nextitem.path != item.path  # test of its module
        left = self.of(item, is_last)
        if left:
            gc.collect()  # a socket may be part of a reference cycle
        deadline = time.monotonic() + WAIT_S
        while left and time.monotonic() < deadline:
            time.sleep(0.05)
            left = self.of(item, is_last)
        for pid in self.processes(is_last):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if left:
            pytest.fail(f"left behind {WAIT_S:.0f} s after the test:\n" + "\n".join(left), pytrace=False)

    def of(self, item: pytest.Item, is_last: bool) -> list[str]:
        left = []
        for pid in self.processes(is_last):
            ports = [f", listens at {address}" for address in addresses_of(pid)]
            left.append(f"process {pid}: {command_of(pid)}{''.join(ports)}")
        if opened := sockets_of(os.getpid()) - self.sockets:
            left += [f"a socket of the tests' process, listens at {address}" for address in accepting(opened)]
        left += [f"{SHARED / name}, which no process uses" for name in unused(shared_memory() - self.shared)]
        folder = getattr(item, "funcargs", {}).get("tmp_path")
        if isinstance(folder, Path) and not item.get_closest_marker("leaves_tmp"):
            left += half_written(folder)
        return left

    def processes(self, is_last: bool) -> list[int]:
        """Return the processes of the test, and after the last test of a module those of its fixtures."""
        found = marked_processes(mark.value, running() - self.pids)
        return found + marked_processes(wide, running()) if is_last else found


def running() -> set[int]:
    return {int(name) for name in os.listdir("/proc") if name.isdigit()}


def marked_processes(value: str, pids: set[int]) -> list[int]:
    """Return the processes that run under this mark, without multiprocessing's servers of the tests' process."""
    servers = {
        getattr(resource_tracker, "_resource_tracker")._pid,  # noqa: B009
        getattr(forkserver, "_forkserver")._forkserver_pid,  # noqa: B009
        os.getpid(),
    }
    return [pid for pid in sorted(pids - servers) if mark.marks(pid, value) and not is_zombie(pid)]


def addresses_of(pid: int) -> list[str]:
    try:
        return listening([pid])
    except OSError:  # it has exited
        return []


def is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:300]
    except OSError:
        return "has exited"


def own_shared_memory(options: str = "mode=1777", flags: int = 0) -> None:
    """Mount an empty /dev/shm for this process and its children, so that all files in it are theirs.

    If mounting is not permitted, leftovers of a test in another worker are reported here too. `options` are those of
    tmpfs, `flags` those of mount(2).
    """
    libc, new_mounts, slave, all_below = ctypes.CDLL(None, use_errno=True), 0x20000, 1 << 19, 1 << 14
    if (
        SHARED.is_dir()
        and libc.unshare(new_mounts) == 0
        and libc.mount(b"none", b"/", None, slave | all_below, None) == 0
    ):
        libc.mount(b"tmpfs", bytes(SHARED), b"tmpfs", flags, options.encode())


def half_written(folder: Path) -> list[str]:
    try:
        return [str(path) for path in folder.glob("**/checkpoints/*.tmp")]
    except FileNotFoundError as error:  # a directory was removed during the search; the caller searches again
        return [str(error)]


def shared_memory() -> set[str]:
    """Return the names of the files in shared memory.

    torch unlinks its files right after it has created them. One that is left belongs to a process that was killed
    between the two calls, which no program can prevent.
    """
    return {name for name in os.listdir(SHARED) if not name.startswith("torch_")} if SHARED.is_dir() else set()


def unused(names: set[str]) -> list[str]:
    """Return the files that no process has mapped, because all processes that used them were killed."""
    return sorted(name for name in names - mapped(names) if (SHARED / name).exists())


def mapped(names: set[str], variable: str = "") -> set[str]:
    """Return the files that any process has mapped, or one with this NAME=VALUE in its environment."""
    maps = ""
    for entry in Path("/proc").glob("[0-9]*") if names else ():
        with contextlib.suppress(OSError):
            if not variable or f"{variable}\0".encode() in (entry / "environ").read_bytes():
                maps += (entry / "maps").read_text()
    return {name for name in names if f"{SHARED / name}" in maps}
