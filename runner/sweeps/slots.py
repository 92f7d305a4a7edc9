"""Jobs side by side: each takes as many device slots as it has ranks, and the next one starts when enough are free."""

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Any

from hydra.core.config_loader import ConfigLoader
from omegaconf import DictConfig

from runner.config.schema import Config
from runner.distributed.backend import as_backend
from runner.distributed.cpu_affinity import allowed_cores
from runner.distributed.signals import StopRequest
from runner.errors import InputError
from runner.runs.run_directory import read_result
from runner.sweeps.plan import Job
from runner.sweeps.slot_process import Slotted
from runner.sweeps.sweep import Sweep

POLL_S = 0.02
END_TIMEOUT_S = 30.0  # for jobs that were asked to save and stop


@dataclass
class Running:
    """A job that runs on its slots."""

    job: Job
    slots: list[int]
    process: subprocess.Popen[bytes]
    stderr: IO[bytes]
    start: float


def check_slots(slots: Any, configs: Sequence[Config]) -> None:
    """Raises InputError when this machine has not so many devices, or a job needs more slots than there are."""
    if not isinstance(slots, int) or isinstance(slots, bool) or slots < 1:
        raise InputError(f"hydra.launcher.slots={slots} must be an integer of at least 1; try 2")
    from runner.launchers.launch import make_launcher

    num_cores, num_gpus = len(allowed_cores()), _count_gpus(configs)
    devices, kind = (num_gpus, "GPUs") if num_gpus else (num_cores, "CPU cores")
    if slots > devices:
        raise InputError(
            f"hydra.launcher.slots={slots} must be at most the {devices} {kind} that this machine has for them; "
            f"try hydra.launcher.slots={devices}"
        )
    for config in configs:
        if config.debug:
            raise InputError("debug=true is for the process that has the terminal; drop it, or hydra/launcher=slots")
        if make_launcher(config).queues:
            raise InputError("hydra/launcher=slots runs jobs on this machine, and launcher=slurm queues them; drop one")
        if "nodes" in config.launcher and config.launcher["nodes"] != 1:
            raise InputError("hydra/launcher=slots runs jobs on this machine alone; leave launcher.nodes out")
        if (ranks := count_ranks(config)) > slots:
            raise InputError(
                f"launcher.nproc_per_node={ranks}: a job takes as many slots as it has ranks, and there are "
                f"hydra.launcher.slots={slots}; type at most that many ranks"
            )


def count_ranks(config: Config) -> int:
    """The ranks that the job's launcher starts on this machine."""
    starts_processes = "nproc_per_node" in config.launcher
    return config.launcher["nproc_per_node"] if starts_processes else 1


def run_in_slots(
    sweep: Sweep, jobs: Sequence[Sequence[str]], first: int, slots: int, master: DictConfig, loader: ConfigLoader
) -> None:
    """Run the jobs, in their order, on `slots` slots; what becomes of each is in the ledger.

    jobs: the words of each, the first one being number `first` in the sweep's order. Raises SystemExit(143) after a
    signal, when what ran has saved.
    """
    waiting = [_compose(sweep, position, words, master, loader) for position, words in enumerate(jobs, start=first)]
    check_slots(slots, [slotted.config for _, slotted in waiting])
    num_gpus = _count_gpus([slotted.config for _, slotted in waiting])
    cores, gpus = deal(sorted(allowed_cores()), slots), deal(list(range(num_gpus)), slots)
    free, num_jobs = list(range(slots)), len(waiting)
    running: list[Running] = []
    with StopRequest() as stop, _all_ending(running):
        while running or (waiting and not stop.received):
            while waiting and not stop.received and len(free) >= count_ranks(waiting[0][1].config):
                job, slotted = waiting.pop(0)
                own, free = free[: count_ranks(slotted.config)], free[count_ranks(slotted.config) :]
                slotted.cores[:] = [core for slot in own for core in cores[slot]]
                slotted.gpus[:] = [gpu for slot in own for gpu in gpus[slot]]
                print(f"job {num_jobs - len(waiting)} of {num_jobs} on slot {_listed(own)}: {job.label}", flush=True)
                running.append(_start(sweep, job, slotted, own))
            for each in [each for each in running if each.process.poll() is not None]:
                running.remove(each)
                free = sorted(free + each.slots)
                _record(sweep, each)
            if stop.received:
                _ask_to_stop(running)
                break
            time.sleep(POLL_S)
        _await_end(sweep, running)
    if stop.received:
        raise SystemExit(143)


def deal(devices: Sequence[int], slots: int) -> list[list[int]]:
    """The devices of each slot, as many to each; what is left over stays idle."""
    each = len(devices) // slots
    return [list(devices[slot * each : (slot + 1) * each]) for slot in range(slots)]


def _compose(
    sweep: Sweep, position: int, words: Sequence[str], master: DictConfig, loader: ConfigLoader
) -> tuple[Job, Slotted]:
    from runner.config.compose import checked

    cfg = loader.load_sweep_config(master, list(words))
    request = sweep.request(sweep.jobs[position], list(words), dict(cfg.hydra.runtime.choices))
    return sweep.jobs[position], Slotted(checked(cfg, list(words)), request, cores=[], gpus=[])


def _start(sweep: Sweep, job: Job, slotted: Slotted, slots: list[int]) -> Running:
    stderr = tempfile.TemporaryFile()  # noqa: SIM115  # closed when the job has ended
    sweep.tell(job, "running", slots=slots)
    process = subprocess.Popen(
        [sys.executable, "-m", "runner.sweeps.slot_process"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,  # the job's log.txt has it
        stderr=stderr,
        start_new_session=True,  # a terminal's Ctrl-C comes through this process, and none of its ranks is forgotten
    )
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(pickle.dumps(slotted))
        process.stdin.flush()  # and stays open: its end tells the job that this process has died
    return Running(job, slots, process, stderr, time.monotonic())


def _record(sweep: Sweep, ended: Running, stopped: bool = False) -> None:
    """Write what became of a job, and tell the user. stopped: it was asked to end."""
    assert ended.process.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        ended.process.stdin.close()
    ended.stderr.seek(0)
    said, status = ended.stderr.read().decode(errors="replace").strip(), ended.process.returncode
    ended.stderr.close()
    result = read_result(sweep.path(ended.job)) or {}
    metrics = result.get("metrics", {})
    if status == 0:
        state, error = sweep.tell_result(ended.job, metrics), None
    else:
        state = {2: "refused", 143: "preempted"}.get(status, "failed")
        if stopped and status < 0:  # it had no time to save, or no signal handler yet
            state = "preempted"
        died = f"ended by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
        error = said if state == "refused" else result.get("error") or said or died
        sweep.tell(ended.job, state, error=error)
    numbers = "  ".join(f"{name} {value:.4f}" for name, value in metrics.items()) if status == 0 else error
    print(f"{ended.job.label} {state} after {time.monotonic() - ended.start:.1f} s  {numbers}", flush=True)


def _ask_to_stop(running: Sequence[Running]) -> None:
    for each in running:
        each.process.send_signal(signal.SIGTERM)


def _await_end(sweep: Sweep, running: list[Running]) -> None:
    deadline = time.monotonic() + END_TIMEOUT_S
    for each in list(running):
        try:
            each.process.wait(max(deadline - time.monotonic(), 0))
        except subprocess.TimeoutExpired:
            os.killpg(each.process.pid, signal.SIGKILL)
            each.process.wait()
        running.remove(each)
        _record(sweep, each, stopped=True)


@contextlib.contextmanager
def _all_ending(running: list[Running]) -> Iterator[None]:
    """Whatever happens here, a second Ctrl-C too, no job is left running."""
    try:
        yield
    finally:
        for each in running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(each.process.pid, signal.SIGKILL)
            each.process.wait()


def _count_gpus(configs: Sequence[Config]) -> int:
    """The GPUs that the jobs may have; none when all of them run on the CPU."""
    import torch

    if any(as_backend(config.backend).device_type() == "cuda" for config in configs):
        return torch.cuda.device_count()
    return 0


def _listed(slots: Sequence[int]) -> str:
    return ", ".join(map(str, slots))
