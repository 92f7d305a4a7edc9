"""A rank's position in the run and its threads' stacks, in memory that the other ranks on its machine can read."""

import contextlib
import ctypes
import faulthandler
import os
import signal
import socket
import struct
import sys
import time
from typing import NamedTuple

from runner.process.identity import machine_id, process_start, process_state

STACKS_SIGNAL = signal.SIGUSR2  # writes the stacks of all threads, whatever the process is doing
_POSITION = struct.Struct("d192s")  # the time on the machine's monotonic clock, and the position; the stacks follow


class RankProcess(NamedTuple):
    """A rank's process, as published in the store."""

    rank: int
    host: str
    machine: str  # equal for processes that can signal each other and reach each other's sockets
    pid: int
    started: int  # in clock ticks since the machine's start, because another process may get the same pid later
    file: int  # the descriptor, in that process, of its position and stacks; -1 on systems without Linux's /proc

    def at(self, rank: int) -> "RankProcess":
        """Return the same process with another rank."""
        return RankProcess(rank, *self[1:])


class Heartbeat:
    """This process's position and stacks. Other processes can read them on Linux only."""

    def __init__(self, rank: int):
        self._rank = rank
        self._process: RankProcess | None = None
        self._position, self._recorded_at = "the beginning", time.monotonic()

    def start(self) -> RankProcess:
        """Make the heartbeat readable for other processes. Return this rank's process."""
        if self._process is None:
            host, pid = socket.gethostname(), os.getpid()
            self._process = RankProcess(self._rank, host, f"{host}/{pid}", pid, 0, -1)
            if sys.platform == "linux":
                file = os.memfd_create("heartbeat")
                os.lseek(file, _POSITION.size, os.SEEK_SET)
                faulthandler.register(STACKS_SIGNAL, file=file, all_threads=True)
                # Two containers may have the same host name and the same pids.
                network = os.readlink("/proc/self/ns/net")
                machine = "/".join([machine_id(), network, host, str(os.getuid())])
                self._process = RankProcess(self._rank, host, machine, pid, process_start(pid) or 0, file)
            self.record(self._position)
        return self._process

    def renumber(self, rank: int) -> None:
        """Give this process another rank."""
        self._rank = rank
        if self._process is not None:
            self._process = self._process.at(rank)

    def record(self, position: str) -> None:
        """Record that this rank is now at `position`, for example "step 12"."""
        self._position, self._recorded_at = position, time.monotonic()
        if self._process is not None and self._process.file >= 0:
            os.pwrite(self._process.file, _POSITION.pack(self._recorded_at, position.encode()[:192]), 0)

    def last(self) -> tuple[str, float]:
        """Return the last recorded position, and the seconds since then."""
        return self._position, time.monotonic() - self._recorded_at


def state_of(process: RankProcess) -> str:
    """Return "exited", "stopped" (by a signal, not by a debugger) or "running" for a process on this machine."""
    state, started = process_state(process.pid)
    if started != process.started:
        return "exited"
    return "stopped" if state == "T" else "running"


def read_position(process: RankProcess) -> tuple[str, float]:
    """Return the last position of a process on this machine and the seconds since then; ("", 0.0) if unreadable."""
    try:
        with open(f"/proc/{process.pid}/fd/{process.file}", "rb") as file:
            recorded_at, position = _POSITION.unpack(file.read(_POSITION.size))
    except (OSError, struct.error):
        return "", 0.0
    return position.rstrip(b"\0").decode(errors="replace"), time.monotonic() - recorded_at


def read_stacks(process: RankProcess, timeout_s: float) -> str:
    """Return a process's stacks, of all threads; "" if it does not write them in time. A stopped process continues."""
    deadline = time.monotonic() + timeout_s
    try:
        with open(f"/proc/{process.pid}/fd/{process.file}", "rb") as file:
            file.seek(0, os.SEEK_END)
            # The main thread of a stopped process must handle the signal before it does anything else. A signal to
            # the whole process would be handled by the thread that wakes first. Python lacks tgkill.
            if state_of(process) != "exited":
                ctypes.CDLL(None).tgkill(process.pid, process.pid, int(STACKS_SIGNAL))
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
