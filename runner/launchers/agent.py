"""A process that runs one job for the process that has started it, possibly from another machine.

usage: python -m runner.launchers.agent, with standard input as runner.launchers.agent_process writes it
"""

import os
import pickle
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

from runner.config.custom_dirs import add_to_path
from runner.config.request import Request
from runner.distributed.environment import RankInfo
from runner.distributed.failures.signals import install_handlers
from runner.errors import exiting_on_system_errors
from runner.jobs.process_tuning import begin_imports, tune_process
from runner.process.standard_streams import open_streams

if TYPE_CHECKING:  # imports torch
    from runner.launchers.contract import Launcher

SIZE_BYTES = 8  # of the number in front of the pickled assignment, which states its size
ALIVE = 0  # the byte by which the starter shows that it is running; any other one is the number of a signal


@dataclass(frozen=True)
class Assignment:
    """What an agent does."""

    request: Request
    launcher: "Launcher | None" = None  # None for that of the request
    cores: Sequence[int] = ()  # to which the process is confined; empty: all
    gpus: Sequence[int] = ()  # as cores, among the GPUs that the starter sees
    silence_s: float | None = None  # without a byte from the starter until it counts as lost; None on the same machine
    save_s: float = 0.0  # for the job to save once the starter is lost


def main() -> int:
    """Run the job of the assignment. Return the exit status that it would have as a separate command."""
    lifeline = _take_standard_input()
    size = int.from_bytes(_read(lifeline, SIZE_BYTES), "big")
    assignment: Assignment = pickle.loads(_read(lifeline, size))
    threading.Thread(target=_follow_starter, args=(lifeline, assignment), daemon=True, name="starter").start()
    confine(assignment.cores, assignment.gpus)
    add_to_path(assignment.request.command.config_dirs)
    from runner.launchers.launch import launch_and_report

    tune_process()
    return launch_and_report(assignment.request, RankInfo(), assignment.launcher)


def confine(cores: Sequence[int], gpus: Sequence[int]) -> None:
    """Confine this process, before it uses CUDA, to these cores and to these of the GPUs that its starter sees."""
    if cores and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)
    if gpus:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(max(gpus) + 1)))
        names = visible.split(",")
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(names[gpu] for gpu in gpus)


def _take_standard_input() -> int:
    """Return a new descriptor of standard input, and close that for the ranks, which must not read from it."""
    lifeline, null = os.dup(0), os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    return lifeline


def _read(lifeline: int, size: int) -> bytes:
    """Read exactly this many bytes, unbuffered, because later bytes are read as they arrive."""
    found = b""
    while len(found) < size:
        if not (part := os.read(lifeline, size - len(found))):
            sys.exit("the process that started this agent has exited")
        found += part
    return found


def _follow_starter(lifeline: int, assignment: Assignment) -> None:
    """Pass on the starter's signals. Once the starter is lost, let the job save, and kill its whole process group.

    Over a connection that is cut, the end of the input never arrives, but neither does a byte.
    """
    while select.select([lifeline], [], [], assignment.silence_s)[0] and (received := os.read(lifeline, 1)):
        if received[0] != ALIVE:
            os.kill(os.getpid(), received[0])
    if assignment.save_s:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(assignment.save_s)
    os.killpg(0, signal.SIGKILL)  # a resumed sweep or run may start this job again


def run_agent(main: Callable[[], int]) -> NoReturn:
    """Run the main function of an agent's process, prepared for signals, and exit with its status."""
    open_streams()
    install_handlers()
    begin_imports()
    with exiting_on_system_errors():
        sys.exit(main())


if __name__ == "__main__":
    run_agent(main)
