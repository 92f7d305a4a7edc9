"""The actor that starts processes on a node of a Ray cluster. This module imports only the standard library.

Ray sends the actor's class by value: it aborts the process of an actor whose module it cannot import, instead of
reporting that the node lacks the runner.
"""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from typing import IO, NamedTuple

LOST = 255  # status of an agent whose starter or node is lost; an agent does not exit with it
SET_BY_RAY = "OMP_NUM_THREADS"  # to the number of CPUs of the actor
TAIL_BYTES = 100_000  # of an output


class Ended(NamedTuple):
    """The end of a process."""

    status: int
    output: bytes
    errors: bytes


class Starter:
    """Starts processes in a directory, with these environment variables, and writes their input.

    silence_s: seconds without a call after which agents exit by themselves, because they consider the command that
    calls this actor as lost.
    """

    def __init__(self, directory: str, env: Mapping[str, str], silence_s: float):
        inherited = {name: value for name, value in os.environ.items() if name != SET_BY_RAY}
        self._directory, self._env, self._silence_s = directory, {**inherited, **env}, silence_s
        self._processes: dict[int, subprocess.Popen[bytes]] = {}  # those that have received their input
        self._early: dict[int, bytes] = {}  # content for processes that are not among them yet
        self._lock = threading.Lock()  # of both
        self._called_at = time.monotonic()  # the last time that the command called this actor

    def run(self, key: int, words: Sequence[str], content: bytes, path: str | None) -> Ended:
        """Run Python with these arguments and this input. path: a file to which its output is appended instead."""
        self._called_at = time.monotonic()
        with open(path, "ab") if path else tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
            process = subprocess.Popen(
                [sys.executable, *words],
                cwd=self._directory,
                env=self._env,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output if path else errors,
                start_new_session=True,
            )
            _write(process, content)  # a byte that arrives meanwhile must not precede it
            with self._lock:
                self._processes[key], early = process, self._early.pop(key, b"")
            _write(process, early)
            status = process.wait()
            del self._processes[key]
            _close(process)
            if time.monotonic() - self._called_at > self._silence_s:
                status = LOST
            return Ended(status, b"" if path else _tail(output), _tail(errors))

    def send(self, key: int | None, content: bytes) -> None:
        """Append to the input of a process, even before it has started. key: None for all that run."""
        self._called_at = time.monotonic()
        with self._lock:
            processes = [*self._processes.values()] if key is None else self._find(key)
            if key is not None and not processes:
                self._early[key] = self._early.get(key, b"") + content
        for process in processes:
            _write(process, content)

    def close(self, key: int) -> None:
        """End the input of a process."""
        for process in self._find(key):
            _close(process)

    def kill(self, key: int) -> None:
        """Kill a process with its group."""
        for process in self._find(key):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

    def _find(self, key: int) -> list[subprocess.Popen[bytes]]:
        return [process for process in (self._processes.get(key),) if process is not None]


def _write(process: subprocess.Popen[bytes], content: bytes) -> None:
    assert process.stdin is not None
    with contextlib.suppress(OSError, ValueError):  # it has exited; ValueError: it was closed meanwhile
        process.stdin.write(content)
        process.stdin.flush()


def _close(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    with contextlib.suppress(OSError):  # it has exited before it received everything
        process.stdin.close()


def _tail(file: IO[bytes]) -> bytes:
    file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
    return file.read()
