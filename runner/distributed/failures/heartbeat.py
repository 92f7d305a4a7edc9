"""A rank's position in the run and its threads' stacks, in memory that the other ranks on its machine can read."""

import contextlib
import ctypes
import faulthandler
import json
import os
import signal
import socket
import struct
import sys
import time
from pathlib import Path
from typing import NamedTuple

STACKS_SIGNAL = signal.SIGUSR2  # writes the stacks of all threads, whatever the process is doing
_LAYOUT = struct.Struct("d192s")  # the time on the machine's monotonic clock, and the position
_STATE, _STARTED = 0, 19  # fields of /proc/PID/stat, counted after the name
_tgkill = getattr(ctypes.CDLL(None), "tgkill", None) if sys.platform == "linux" else None  # missing in Python


class RankProcess(NamedTuple):
    """A rank's process, as published in the store.

    Attributes:
        machine: equal for processes that can signal each other.
        started: in clock ticks since the machine's start, because another process may get the same pid later.
        position_file, stacks_file: file descriptors in that process; -1 if the system has no /proc.
        network: equal for processes that can reach each other's sockets.
    """

    rank: int
    host: str
    machine: str
    pid: int
    started: int
    position_file: int
    stacks_file: int
    network: str

    def dump(self) -> str:
        return json.dumps(self)

    @staticmethod
    def load(text: str | bytes) -> "RankProcess":
        return RankProcess(*json.loads(text))


class Heartbeat:
    """This process's position and stacks. Records nothing on systems without Linux's /proc."""

    def __init__(self, rank: int):
        self._process = RankProcess(
            rank, socket.gethostname(), f"{socket.gethostname()}/{os.getpid()}", 0, 0, -1, -1, ""
        )

    def start(self) -> RankProcess:
        """Make the heartbeat readable for other processes. Return this rank's process."""
        if self._process.pid:
            return self._process
        self._process = self._process._replace(pid=os.getpid(), network=_read_link("/proc/self/ns/net"))
        if sys.platform == "linux" and (machine := _machine()):
            position_file, stacks_file = os.memfd_create("position"), os.memfd_create("stacks")
            self._process = self._process._replace(
                machine=machine,
                started=int(_stat_of(os.getpid())[_STARTED]),
                position_file=position_file,
                stacks_file=stacks_file,
            )
            faulthandler.register(STACKS_SIGNAL, file=stacks_file, all_threads=True)
            self.record("the beginning")
        return self._process

    def record(self, position: str) -> None:
        """Record that this rank is now at `position`, for example "step 12"."""
        if self._process.position_file >= 0:
            data = _LAYOUT.pack(time.monotonic(), position.encode()[:192])
            os.pwrite(self._process.position_file, data, 0)

    def last(self) -> tuple[str, float]:
        """Return the last recorded position, and the seconds since then."""
        file = self._process.position_file
        return ("", 0.0) if file < 0 else _unpack(os.pread(file, _LAYOUT.size, 0))

    def own_stacks(self) -> str:
        """Return the stacks of all threads of this process."""
        file = self._process.stacks_file
        if file < 0:
            return ""
        start = os.fstat(file).st_size
        faulthandler.dump_traceback(file, all_threads=True)
        return os.pread(file, os.fstat(file).st_size - start, start).decode(errors="replace")


def state_of(process: RankProcess) -> str:
    """Return "exited", "stopped" (by a signal, not by a debugger) or "running" for a process on this machine."""
    try:
        fields = _stat_of(process.pid)
    except OSError:
        return "exited"
    if int(fields[_STARTED]) != process.started or fields[_STATE] in "ZX":
        return "exited"
    return "stopped" if fields[_STATE] == "T" else "running"


def read_position(process: RankProcess) -> tuple[str, float]:
    """Return the last position of a process on this machine and the seconds since then; ("", 0.0) if unreadable."""
    try:
        with open(f"/proc/{process.pid}/fd/{process.position_file}", "rb") as file:
            return _unpack(file.read(_LAYOUT.size))
    except (OSError, struct.error):
        return "", 0.0


def read_stacks(process: RankProcess, timeout_s: float) -> str:
    """Return the stacks of all threads of a process on this machine; "" if it does not write them in time.

    A stopped process continues.
    """
    path, deadline = f"/proc/{process.pid}/fd/{process.stacks_file}", time.monotonic() + timeout_s
    try:
        with open(path, "rb") as file:
            file.seek(0, os.SEEK_END)
            # The main thread of a stopped process has to handle the signal before it does anything else. A signal to
            # the process would be handled by whichever thread wakes first.
            if _tgkill is not None and state_of(process) != "exited":
                _tgkill(process.pid, process.pid, STACKS_SIGNAL)
            send_signal(process, signal.SIGCONT)
            stacks = b""
            while time.monotonic() < deadline:
                time.sleep(0.1)
                if not (more := file.read()) and stacks:
                    break
                stacks += more
            return stacks.decode(errors="replace")
    except OSError:
        return ""


def send_signal(process: RankProcess, number: signal.Signals) -> None:
    """Send a signal to a process on this machine, unless it has exited and its pid belongs to another one."""
    if state_of(process) != "exited":
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, number)


def _machine() -> str:
    """Return an identifier shared by the processes that this one can signal; "" if the system does not provide one."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
    # Two containers may have the same host name and the same pids.
    namespace = _read_link("/proc/self/ns/pid")
    return f"{boot}/{namespace}/{os.getuid()}" if namespace else ""


def _read_link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


def _stat_of(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat after the name; the first one is the state."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def _unpack(data: bytes) -> tuple[str, float]:
    recorded, position = _LAYOUT.unpack(data)
    return position.rstrip(b"\0").decode(errors="replace"), time.monotonic() - recorded
