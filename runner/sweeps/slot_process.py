"""One job of a sweep on its slots' devices alone: what hydra/launcher=slots starts."""

import os
import pickle
import signal
import sys
import threading
from dataclasses import dataclass

from runner.config.own_folders import add_to_path
from runner.config.schema import Config
from runner.distributed.environment import RankInfo
from runner.distributed.signals import listen
from runner.launchers.freed_memory import keep_freed_memory
from runner.launchers.imported import begin_imports, end_imports
from runner.runs.run_directory import Request


@dataclass(frozen=True)
class Slotted:
    """What the process is told on its standard input, which ends when the sweep's own process does."""

    config: Config
    request: Request
    cores: list[int]
    gpus: list[int]  # of those that the sweep's process sees


def main() -> int:
    """Run the job. Returns the exit status that the job alone would have."""
    slotted: Slotted = pickle.load(sys.stdin.buffer)  # by a pipe that the sweep's own process alone writes to
    threading.Thread(target=_end_with_sweep, daemon=True, name="sweep").start()
    confine(slotted.cores, slotted.gpus)
    add_to_path(slotted.request.config_dirs)
    from runner.launchers.launch import launch_and_tell

    end_imports()
    keep_freed_memory()
    return launch_and_tell(slotted.config, slotted.request, RankInfo())


def confine(cores: list[int], gpus: list[int]) -> None:
    """Keep this process, and those that it starts, to these devices. CUDA must not have been used yet."""
    if cores and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)
    else:
        os.environ.setdefault("OMP_NUM_THREADS", str(len(cores)))
    if gpus:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(max(gpus) + 1)))
        names = visible.split(",")
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(names[gpu] for gpu in gpus)


def _end_with_sweep() -> None:
    while os.read(sys.stdin.fileno(), 1):  # sys.stdin itself may not be waited for while Python ends
        pass
    # At once and with its ranks: whoever resumes the sweep may start this job again.
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    listen()
    begin_imports()
    sys.exit(main())
