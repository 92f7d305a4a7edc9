"""hydra/launcher=slots: jobs in parallel, each on as many device slots as it has ranks."""

import contextlib
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any

from omegaconf import DictConfig

from runner.config.compose import checked
from runner.config.request import Request
from runner.config.schema import Config
from runner.distributed.backend import as_backend
from runner.distributed.failures.signals import handling_signals, received
from runner.distributed.machine import allowed_cores
from runner.errors import InputError
from runner.launchers.agent import Assignment
from runner.launchers.agent_handle import AgentHandle
from runner.records.ledger import JobRecord
from runner.records.run_record import NOT_RUN, RUNNING, find_run
from runner.records.tables import format_number
from runner.sweeps.sweep import Sweep

POLL_S = 0.02
SAVE_TIMEOUT_S = 30.0  # for jobs to save and exit after a signal


@dataclass
class RunningJob:
    """A running job with its slots and its agent. `stderr` is a file that receives its standard error."""

    job: JobRecord
    slots: list[int]
    agent: AgentHandle
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
    num = launcher.get("nproc_per_node", 1)
    if not isinstance(num, int):
        raise InputError(f"launcher.nproc_per_node={num}: a job in slots needs a number of ranks")
    return num


def run_in_slots(sweep: Sweep, composed: Sequence[DictConfig], first: int, num_slots: int) -> None:
    """Run the jobs in their order on the slots, and record their outcomes in the ledger.

    composed: the configuration of each job, with Hydra's own node. first: the position of the first of these jobs in
    `sweep.jobs`. Raises SystemExit(143) after a signal, once the running jobs have saved and exited.
    """
    waiting = []
    for job, cfg in zip(sweep.jobs[first:], composed, strict=True):
        overrides = list(cfg.hydra.overrides.task)
        choices = dict(cfg.hydra.runtime.choices)
        waiting.append((job, sweep.request(job, checked(cfg, overrides), overrides, choices)))
    configs = [request.config for _, request in waiting]
    check_slots(num_slots, configs)
    slots = _Slots(sweep, waiting, num_slots, _count_gpus(configs))
    deadline: float | None = None  # of the running jobs, after a signal
    with handling_signals():
        try:
            while slots.running or (slots.waiting and not received()):
                slots.start_jobs()
                slots.record_ended(deadline is not None)
                if received() and deadline is None:
                    deadline = time.monotonic() + SAVE_TIMEOUT_S
                    for each in slots.running:
                        each.agent.send_signal(signal.SIGTERM)
                if deadline is not None and time.monotonic() > deadline:
                    slots.kill_jobs()
                time.sleep(POLL_S)
        finally:
            slots.kill_jobs()  # for example after a second Ctrl-C
    if received():
        raise SystemExit(143)


class _Slots:
    """The slots with their devices, the jobs that wait for slots, and the jobs that run.

    Attributes:
        waiting: The jobs that have not started, in their order, with their requests.
        running: The jobs whose processes have been started and whose outcomes have not been recorded.
    """

    def __init__(self, sweep: Sweep, waiting: list[tuple[JobRecord, Request]], num_slots: int, num_gpus: int):
        self.waiting = waiting
        self.running: list[RunningJob] = []
        self._sweep, self._num_jobs = sweep, len(waiting)
        self._cores = divide(sorted(allowed_cores()), num_slots)
        self._gpus = divide(list(range(num_gpus)), num_slots)
        self._free = list(range(num_slots))

    def start_jobs(self) -> None:
        """Start waiting jobs in their order until the next one needs more slots than are free, or a signal arrives."""
        while self.waiting and not received():
            job, request = self.waiting[0]
            if len(self._free) < (size := count_ranks(request.config.launcher)):
                return
            self.waiting.pop(0)
            if self._sweep.skips(job):
                continue
            slots, self._free = self._free[:size], self._free[size:]
            number, listed = self._num_jobs - len(self.waiting), ", ".join(map(str, slots))
            print(f"job {number} of {self._num_jobs} on slot {listed}: {job.label}", flush=True)
            cores, gpus = ([each for slot in slots for each in of[slot]] for of in (self._cores, self._gpus))
            self.running.append(_start(self._sweep, job, slots, Assignment(request, None, cores, gpus)))

    def record_ended(self, stopped: bool) -> None:
        """Record the jobs that have ended, and free their slots. `stopped` is True if they were signaled to stop."""
        for each in [each for each in self.running if each.agent.status is not None]:
            self.running.remove(each)
            self._free = sorted(self._free + each.slots)
            _record_outcome(self._sweep, each, stopped)

    def kill_jobs(self) -> None:
        """Kill the processes of the running jobs."""
        for each in self.running:
            each.agent.kill()


def divide(devices: Sequence[int], slots: int) -> list[list[int]]:
    """Return the devices of each slot, equally many for each; the remainder is not used."""
    size = len(devices) // slots
    return [list(devices[slot * size : (slot + 1) * size]) for slot in range(slots)]


def _start(sweep: Sweep, job: JobRecord, slots: list[int], assignment: Assignment) -> RunningJob:
    with contextlib.ExitStack() as opened:
        stderr = opened.enter_context(tempfile.TemporaryFile())
        sweep.write_state(job, "running", slots=slots)
        agent = AgentHandle(assignment, subprocess.DEVNULL, stderr)  # the lines of its output are in the job's log.txt
        opened.pop_all()  # _record_outcome closes the file
    return RunningJob(job, slots, agent, stderr)


def _record_outcome(sweep: Sweep, ended: RunningJob, stopped: bool) -> None:
    """Record and print the outcome of a job. `stopped` is True if it was signaled to stop."""
    ended.agent.close()
    ended.stderr.seek(0)
    stderr, status = ended.stderr.read().decode(errors="replace").strip(), ended.agent.status or 0
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


def _count_gpus(configs: Sequence[Config]) -> int:
    """Return the number of GPUs on this machine; 0 if all jobs run on the CPU."""
    import torch

    if any(as_backend(config.backend).device_type() == "cuda" for config in configs):
        return torch.cuda.device_count()
    return 0
