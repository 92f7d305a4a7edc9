"""An agent (runner.launchers.agent) that a command starts, in the process that has started it."""

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import IO

from runner.launchers.agent import ALIVE, SIZE_BYTES, Assignment

COMMAND = (sys.executable, "-m", "runner.launchers.agent")
HEARTBEAT_S = 5.0


def input_of(assignment: Assignment) -> bytes:
    """Return the beginning of the standard input of an agent."""
    content = pickle.dumps(assignment)
    return len(content).to_bytes(SIZE_BYTES, "big") + content


class AgentProcess:
    """A started agent. It ends at the end of its input, which is when this process closes it or dies.

    command: starts the agent, possibly on another machine. output, errors: files, or constants of subprocess.
    """

    def __init__(
        self, assignment: Assignment, output: IO[bytes] | int, errors: IO[bytes] | int, command: Sequence[str] = COMMAND
    ):
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=errors,
            start_new_session=True,  # only the starter receives Ctrl-C, and it can kill the agent's whole group
        )
        self._is_closed = threading.Event()
        self._write(input_of(assignment))
        if assignment.silence_s is not None:
            threading.Thread(target=self._beat, daemon=True, name="heartbeat").start()

    @property
    def status(self) -> int | None:
        """The exit status; None while the agent runs."""
        return self.process.poll()

    def send_signal(self, number: int) -> None:
        self._write(bytes([number]))

    def close(self) -> None:
        """End the input, at which the agent ends. An agent that has exited needs it, too."""
        self._is_closed.set()
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()

    def kill(self) -> None:
        """Kill the started process, if it runs, with its group, which is the whole agent if it is on this machine."""
        if self.status is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def _beat(self) -> None:
        """Show the agent regularly that this process is running, also while it waits for a file system."""
        while not self._is_closed.wait(HEARTBEAT_S):
            self._write(bytes([ALIVE]))

    def _write(self, content: bytes) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError, ValueError):  # ValueError: it was closed meanwhile
            self.process.stdin.write(content)
            self.process.stdin.flush()
