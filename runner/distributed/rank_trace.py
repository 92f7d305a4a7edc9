"""What a rank keeps of itself in memory for the others on its machine to read: where it is, and its threads' stacks."""

import ctypes
import faulthandler
import json
import os
import signal
import socket
import struct
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

STACKS_SIGNAL = signal.SIGUSR2  # answered with the stacks of all threads, whatever the process is doing
_LAYOUT = struct.Struct("d192s")  # when it came there, on the machine's monotonic clock, and where it is
_STATE, _STARTED = 0, 19  # of what stands behind the name in /proc/PID/stat
# Of glibc; Python has no call for it.
_tgkill = getattr(ctypes.CDLL(None), "tgkill", None) if sys.platform == "linux" else None


@dataclass(frozen=True)
class RankProcess:
    """A rank's process as its store knows it.

    `place` is equal for processes that can signal each other, `network` for those that reach each other's sockets.
    """

    rank: int
    host: str
    place: str
    pid: int
    started: int  # in clock ticks since the machine's start: another process may get the same pid later
    page: int  # file descriptors of that process
    stacks: int
    network: str

    def dump(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def load(text: str) -> "RankProcess":
        return RankProcess(**json.loads(text))


class RankTrace:
    """This process's own. Elsewhere than on Linux with its /proc it has a name, and nobody reads it."""

    def __init__(self, rank: int):
        self._rank = rank
        self._page = self._stacks = -1
        self._place, self._started = f"{socket.gethostname()}/{os.getpid()}", 0

    def open(self) -> RankProcess:
        """Be readable from now on. Returns who this is."""
        if sys.platform == "linux" and self._page < 0 and (place := _place()):
            self._page, self._stacks = os.memfd_create("where"), os.memfd_create("stacks")
            self._place = place
            self._started = int(stat_of(os.getpid())[_STARTED])
            faulthandler.register(STACKS_SIGNAL, file=self._stacks, all_threads=True)
            self.at("the beginning")
        return RankProcess(
            self._rank,
            socket.gethostname(),
            self._place,
            os.getpid(),
            self._started,
            self._page,
            self._stacks,
            _network(),
        )

    def at(self, where: str) -> None:
        """Say where this rank is, as `step 12`."""
        if self._page >= 0:
            os.pwrite(self._page, _LAYOUT.pack(time.monotonic(), where.encode()[:192]), 0)

    def own_stacks(self) -> str:
        """Those of all threads, as text."""
        if self._stacks < 0:
            return ""
        start = os.fstat(self._stacks).st_size
        faulthandler.dump_traceback(self._stacks, all_threads=True)
        return os.pread(self._stacks, os.fstat(self._stacks).st_size - start, start).decode(errors="replace")

    def where(self) -> tuple[str, float]:
        """As it was last said, and seconds since then."""
        return ("", 0.0) if self._page < 0 else _unpack(os.pread(self._page, _LAYOUT.size, 0))


def _place() -> str | None:
    """This process's; None where the system does not say, and nobody reads it."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        # In containers of one host's name the same number is another process.
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}/{os.getuid()}"
    except OSError:
        return None


def _network() -> str:
    """This process's; empty where the system does not say."""
    try:
        return os.readlink("/proc/self/ns/net")
    except OSError:
        return ""


def stat_of(pid: int) -> list[str]:
    """The fields of /proc/PID/stat behind the name, the state first."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def state_of(process: RankProcess) -> str:
    """gone, stopped (by a signal, not by a debugger) or running; for a process of this place."""
    try:
        fields = stat_of(process.pid)
    except OSError:
        return "gone"
    if int(fields[_STARTED]) != process.started or fields[_STATE] in "ZX":
        return "gone"
    return "stopped" if fields[_STATE] == "T" else "running"


def where_is(process: RankProcess) -> tuple[str, float]:
    """Where a process of this place said that it is, and seconds since then; nothing where it cannot be read."""
    try:
        with open(f"/proc/{process.pid}/fd/{process.page}", "rb") as file:
            return _unpack(file.read(_LAYOUT.size))
    except (OSError, struct.error):
        return "", 0.0


def take_stacks(process: RankProcess, timeout_s: float) -> str:
    """The stacks of all threads of a process of this place; one that is stopped goes on. Empty without an answer."""
    path, deadline = f"/proc/{process.pid}/fd/{process.stacks}", time.monotonic() + timeout_s
    try:
        with open(path, "rb") as file:
            file.seek(0, os.SEEK_END)
            # In this order, and to the main thread: a stopped one answers before it does anything else.
            send(process, STACKS_SIGNAL, to_main_thread=True)
            send(process, signal.SIGCONT)
            answer = b""
            while time.monotonic() < deadline:
                time.sleep(0.1)
                if not (more := file.read()) and answer:
                    break
                answer += more
            return answer.decode(errors="replace")
    except OSError:
        return ""


def send(process: RankProcess, number: signal.Signals, to_main_thread: bool = False) -> None:
    """Signal a process of this place, and no other that has its number by now."""
    try:
        handle = os.pidfd_open(process.pid)
    except OSError:
        return
    try:
        if state_of(process) == "gone":
            return
        if to_main_thread and _tgkill is not None:  # a signal to a process is taken by whichever thread wakes first
            _tgkill(process.pid, process.pid, number)
        else:
            signal.pidfd_send_signal(handle, number)
    except ProcessLookupError:
        pass
    finally:
        os.close(handle)


def _unpack(data: bytes) -> tuple[str, float]:
    since, where = _LAYOUT.unpack(data)
    return where.rstrip(b"\0").decode(errors="replace"), time.monotonic() - since
