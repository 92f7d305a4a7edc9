"""The process of one job of hydra/launcher=slots, confined to the devices of its slots."""

import os
import pickle
import signal
import sys
import threading

from runner.config.custom_dirs import add_to_path
from runner.distributed.environment import RankInfo
from runner.distributed.failures.signals import install_handlers
from runner.errors import exiting_on_system_errors
from runner.jobs.process_tuning import begin_imports, tune_process
from runner.process.standard_streams import open_streams


def main() -> int:
    """Run the job that standard input describes. Return the exit status that it would have as a separate command."""
    # A pipe to which only the sweep's process writes. It stays open until that process exits.
    request, cores, gpus = pickle.load(sys.stdin.buffer)
    threading.Thread(target=_die_with_sweep, daemon=True, name="sweep").start()
    confine(cores, gpus)
    add_to_path(request.command.config_dirs)
    from runner.launchers.launch import launch_and_report

    tune_process()
    return launch_and_report(request, RankInfo())


def confine(cores: list[int], gpus: list[int]) -> None:
    """Confine this process, before it uses CUDA, to these cores and to these of the GPUs that the sweep sees."""
    if cores and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)
    if gpus:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(max(gpus) + 1)))
        names = visible.split(",")
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(names[gpu] for gpu in gpus)


def _die_with_sweep() -> None:
    while os.read(sys.stdin.fileno(), 1):  # not with sys.stdin.read, which would lock sys.stdin while Python exits
        pass
    # Kill all ranks immediately, because a resumed sweep may start this job again.
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    open_streams()
    install_handlers()
    begin_imports()
    with exiting_on_system_errors():
        sys.exit(main())
