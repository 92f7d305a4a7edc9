"""hydra/launcher=slots: jobs in parallel, each on as many device slots as it has ranks."""

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any

from hydra.core.config_loader import ConfigLoader
from omegaconf import DictConfig

from runner.config.schema import Config
from runner.distributed.backend import as_backend
from runner.distributed.failures.signals import handling_signals, received
from runner.distributed.machine import allowed_cores
from runner.errors import InputError
from runner.records.ledger import JobRecord
from runner.records.run_record import NOT_RUN, RUNNING, find_run
from runner.records.tables import format_number
from runner.sweeps.sweep import Sweep

POLL_S = 0.02
SAVE_TIMEOUT_S = 30.0  # for jobs to save and exit after a signal


@dataclass
class RunningJob:
    """A running job with its slots and its process. `stderr` is a file that receives its standard error."""

    job: JobRecord
    slots: list[int]
    process: subprocess.Popen[bytes]
    stderr: IO[bytes]


def check_slots(slots: Any, configs: Sequence[Config]) -> None:
    """Raise InputError if this machine lacks devices for the slots, or if a job cannot run in them."""
    num_cores, num_gpus = len(allowed_cores()), _count_gpus(configs)
    devices, kind = (num_gpus, "GPUs") if num_gpus else (num_cores, "CPU cores")
    if not isinstance(slots, int) or not 1 <= slots <= devices:
        raise InputError(
            f"hydra.launcher.slots={slots} must be an integer from 1 to {devices}, the number of {kind} that the jobs "
            "can use here"
        )
    for config in configs:
        if config.debug:
            raise InputError("debug=true needs a process with a terminal; remove it, or hydra/launcher=slots")
        if (ranks := count_ranks(config.launcher)) > slots:
            raise InputError(
                f"launcher.nproc_per_node={ranks}: a job needs a slot for each rank, but hydra.launcher.slots={slots}; "
                "use at most that many ranks"
            )


def count_ranks(launcher: Mapping[str, Any]) -> int:
    """Return the number of ranks that the job's launcher starts on this machine."""
    return int(launcher.get("nproc_per_node", 1))


def run_in_slots(
    sweep: Sweep, jobs: Sequence[Sequence[str]], first: int, slots: int, master: DictConfig, loader: ConfigLoader
) -> None:
    """Run the jobs in their order on the slots, and record their outcomes in the ledger.

    jobs: the overrides of each job. first: the position of the first of them in `sweep.jobs`. Raises SystemExit(143)
    after a signal, once the running jobs have saved and exited.
    """
    from runner.config.compose import checked

    waiting = []
    for job, overrides in zip(sweep.jobs[first:], map(list, jobs), strict=True):
        cfg = loader.load_sweep_config(master, overrides)
        request = sweep.request(job, overrides, dict(cfg.hydra.runtime.choices))
        waiting.append((job, checked(cfg, overrides), request))
    configs = [config for _, config, _ in waiting]
    check_slots(slots, configs)
    cores, gpus = divide(sorted(allowed_cores()), slots), divide(list(range(_count_gpus(configs))), slots)
    free, num_jobs = list(range(slots)), len(waiting)
    running: list[RunningJob] = []
    deadline: float | None = None  # of the running jobs, after a signal
    with handling_signals():
        try:
            while running or (waiting and not received()):
                while waiting and not received() and len(free) >= (num_slots := count_ranks(waiting[0][1].launcher)):
                    job, config, request = waiting.pop(0)
                    if sweep.skips(job):
                        continue
                    used, free = free[:num_slots], free[num_slots:]
                    listed = ", ".join(map(str, used))
                    print(f"job {num_jobs - len(waiting)} of {num_jobs} on slot {listed}: {job.label}", flush=True)
                    own_cores, own_gpus = ([each for slot in used for each in of[slot]] for of in (cores, gpus))
                    running.append(_start(sweep, job, used, pickle.dumps((config, request, own_cores, own_gpus))))
                for each in [each for each in running if each.process.poll() is not None]:
                    running.remove(each)
                    free = sorted(free + each.slots)
                    _record_outcome(sweep, each, deadline is not None)
                if received() and deadline is None:
                    deadline = time.monotonic() + SAVE_TIMEOUT_S
                    for each in running:
                        each.process.send_signal(signal.SIGTERM)
                if deadline is not None and time.monotonic() > deadline:
                    for each in running:
                        _kill(each.process)
                time.sleep(POLL_S)
        finally:
            for each in running:  # for example after a second Ctrl-C
                _kill(each.process)
    if received():
        raise SystemExit(143)


def divide(devices: Sequence[int], slots: int) -> list[list[int]]:
    """Return the devices of each slot, equally many for each; the remainder is not used."""
    size = len(devices) // slots
    return [list(devices[slot * size : (slot + 1) * size]) for slot in range(slots)]


def _start(sweep: Sweep, job: JobRecord, slots: list[int], description: bytes) -> RunningJob:
    stderr = tempfile.TemporaryFile()  # noqa: SIM115  # closed by _record_outcome
    sweep.write_state(job, "running", slots=slots)
    process = subprocess.Popen(
        [sys.executable, "-m", "runner.sweeps.slot_process"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,  # the same lines are in the job's log.txt
        stderr=stderr,
        start_new_session=True,  # only this process receives Ctrl-C, and it can kill the job's whole group
    )
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(description)
        process.stdin.flush()  # stays open: at its end of file, the job detects that this process has died
    return RunningJob(job, slots, process, stderr)


def _record_outcome(sweep: Sweep, ended: RunningJob, stopped: bool) -> None:
    """Record and print the outcome of a job. `stopped` is True if it was signaled to stop."""
    assert ended.process.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        ended.process.stdin.close()
    ended.stderr.seek(0)
    stderr, status = ended.stderr.read().decode(errors="replace").strip(), ended.process.returncode
    ended.stderr.close()
    run = find_run(ended.job.directory)
    if status == 0 and run.state not in (RUNNING, NOT_RUN):  # otherwise user code has called os._exit(0)
        state = sweep.write_outcome(ended.job, run.metrics)
        text = "  ".join(f"{name} {format_number(value)}" for name, value in run.metrics.items())
    else:
        state = {2: "refused", 143: "preempted"}.get(status, "failed")
        if stopped and status < 0:  # it was killed while it was saving, or had no signal handler yet
            state = "preempted"
        text = stderr if state == "refused" else run.error or stderr or f"exit status {status}"
        sweep.write_state(ended.job, state, error=text)
    print(f"{ended.job.label} {state}  {text}", flush=True)


def _kill(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _count_gpus(configs: Sequence[Config]) -> int:
    """Return the number of GPUs on this machine; 0 if all jobs run on the CPU."""
    import torch

    if any(as_backend(config.backend).device_type() == "cuda" for config in configs):
        return torch.cuda.device_count()
    return 0
