"""The process of one job of hydra/launcher=slots, confined to the devices of its slots."""

import os
import pickle
import signal
import sys
import threading
from dataclasses import dataclass

from runner.config.custom_dirs import add_to_path
from runner.config.schema import Config
from runner.distributed.environment import RankInfo
from runner.distributed.failures.signals import install_handlers
from runner.jobs.process_tuning import begin_imports, tune_process
from runner.records.run_directory import Request


@dataclass(frozen=True)
class SlotJob:
    """The job, which the process reads from standard input. That stays open until the sweep's process exits."""

    config: Config
    request: Request
    cores: list[int]
    gpus: list[int]  # indices among those that the sweep's process sees


def main() -> int:
    """Run the job. Return the exit status that the job would have by itself."""
    job: SlotJob = pickle.load(sys.stdin.buffer)  # a pipe to which only the sweep's process writes
    threading.Thread(target=_die_with_sweep, daemon=True, name="sweep").start()
    confine(job.cores, job.gpus)
    add_to_path(job.request.config_dirs)
    from runner.launchers.launch import launch_and_report

    tune_process()
    return launch_and_report(job.config, job.request, RankInfo())


def confine(cores: list[int], gpus: list[int]) -> None:
    """Confine this process and its children to these devices. It must not have used CUDA yet."""
    if cores and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)
    else:
        os.environ.setdefault("OMP_NUM_THREADS", str(len(cores)))
    if gpus:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(max(gpus) + 1)))
        names = visible.split(",")
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(names[gpu] for gpu in gpus)


def _die_with_sweep() -> None:
    while os.read(sys.stdin.fileno(), 1):  # not sys.stdin itself, which a thread must not read while Python exits
        pass
    # Immediately and with all ranks: a resumed sweep may start this job again.
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    install_handlers()
    begin_imports()
    sys.exit(main())
