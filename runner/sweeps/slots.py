"""Jobs in parallel, here or on other machines, each on as many device slots as it has ranks."""

import contextlib
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any

from omegaconf import DictConfig

from runner.config.compose import checked
from runner.config.request import Request
from runner.config.schema import Config
from runner.distributed.failures.signals import handling_signals, received
from runner.errors import InputError, JobFailed, print_messages
from runner.launchers.machines import Agent
from runner.records.ledger import JobRecord
from runner.records.run_record import find_run, watch_outcome
from runner.records.tables import format_number
from runner.sweeps.slot_machines import SlotMachine
from runner.sweeps.sweep import Sweep

POLL_S = 0.02
SAVE_TIMEOUT_S = 30.0  # for jobs to save and exit after a signal


@dataclass
class RunningJob:
    """A running job with its machine, its slots there and its agent.

    stderr: a file for its standard error. has_outcome: whether this start has recorded its outcome in result.json.
    """

    job: JobRecord
    request: Request
    machine: SlotMachine
    slots: list[int]
    agent: Agent
    stderr: IO[bytes]
    has_outcome: Callable[[], bool]


def check_jobs(machines: Sequence[SlotMachine], configs: Sequence[Config]) -> None:
    """Raise InputError if a job cannot run on the slots of any machine."""
    slots = max(machine.num_slots for machine in machines)
    for config in configs:
        if config.debug:
            raise InputError("debug=true needs a process with a terminal; remove it, or hydra/launcher")
        if (ranks := count_ranks(config.launcher)) > slots:
            raise InputError(
                f"launcher.nproc_per_node={ranks}: a job needs a slot for each rank, but hydra.launcher has {slots}; "
                "use at most that many ranks"
            )


def count_ranks(launcher: Mapping[str, Any]) -> int:
    """Return the number of ranks that the job's launcher starts on this machine."""
    num = launcher.get("nproc_per_node", 1)
    if not isinstance(num, int):
        raise InputError(f"launcher.nproc_per_node={num}: a job in slots needs a number of ranks")
    return num


def run_in_slots(sweep: Sweep, composed: Sequence[DictConfig], first: int, machines: Sequence[SlotMachine]) -> None:
    """Run the jobs in their order on the slots, and record their outcomes in the ledger.

    composed: the configuration of each job, with Hydra's own node. first: the position of the first of these jobs in
    `sweep.jobs`. Raises SystemExit(143) after a signal, once the running jobs have saved and exited, and JobFailed if
    all machines are lost.
    """
    waiting = []
    for job, cfg in zip(sweep.jobs[first:], composed, strict=True):
        overrides = list(cfg.hydra.overrides.task)
        choices = dict(cfg.hydra.runtime.choices)
        waiting.append((job, sweep.request(job, checked(cfg, overrides), overrides, choices)))
    check_jobs(machines, [request.config for _, request in waiting])
    slots = _Slots(sweep, waiting, machines)
    deadline: float | None = None  # of the running jobs, after a signal
    with handling_signals():
        try:
            while slots.running or (slots.waiting and not received() and not slots.all_lost):
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
    if slots.waiting:
        text = f"all machines are lost, and {len(slots.waiting)} jobs are left; -m resume={sweep.directory} runs them"
        print_messages([text])
        raise JobFailed(text, directory=str(sweep.directory))


class _Slots:
    """The machines with their slots, the jobs that wait for slots, and the jobs that run.

    Attributes:
        waiting: The jobs that have not started, or whose machine was lost, in their order, with their requests.
        running: The jobs whose processes have been started and whose outcomes have not been recorded.
    """

    def __init__(self, sweep: Sweep, waiting: list[tuple[JobRecord, Request]], machines: Sequence[SlotMachine]):
        self.waiting = waiting
        self.running: list[RunningJob] = []
        self._sweep, self._num_jobs, self._machines = sweep, len(waiting), machines
        self._start_at: dict[int, float] = {}  # of jobs whose machine was lost, by job number
        for machine in machines:
            machine.free = list(range(machine.num_slots))

    @property
    def all_lost(self) -> bool:
        return all(machine.is_lost for machine in self._machines)

    def start_jobs(self) -> None:
        """Start waiting jobs in their order until no machine has enough slots for the next one, or a signal arrives."""
        while not received():
            now = time.monotonic()
            ready = [each for each in self.waiting if self._start_at.get(each[0].number, now) <= now]
            if not ready:
                return
            job, request = ready[0]
            size = count_ranks(request.config.launcher)
            fitting = [each for each in self._machines if not each.is_lost and len(each.free) >= size]
            if not fitting:
                return
            self.waiting.remove(ready[0])
            if self._sweep.skips(job):
                continue
            machine = max(fitting, key=lambda each: len(each.free))
            slots, machine.free = machine.free[:size], machine.free[size:]
            number, listed = self._num_jobs - len(self.waiting), ", ".join(map(str, slots))
            where = f"slot {listed}" + (f" of {machine.name}" if machine.name else "")
            print(f"job {number} of {self._num_jobs} on {where}: {job.label}", flush=True)
            self.running.append(_start(self._sweep, job, request, machine, slots))

    def record_ended(self, stopped: bool) -> None:
        """Record the jobs that have ended, and free their slots. `stopped` is True if they were signaled to stop."""
        for each in [each for each in self.running if each.agent.status is not None]:
            self.running.remove(each)
            each.machine.free = sorted(each.machine.free + each.slots)
            each.stderr.seek(0)
            stderr = each.stderr.read().decode(errors="replace").strip()
            each.stderr.close()
            why = None if stopped else each.machine.why_lost(each.agent.status or 0, stderr)
            if why is None:
                _record_outcome(self._sweep, each, stderr, stopped)
            else:
                self._lose(each, why)

    def kill_jobs(self) -> None:
        """Kill the processes of the running jobs."""
        for each in self.running:
            each.agent.close()
            each.agent.kill()

    def _lose(self, lost: RunningJob, why: str) -> None:
        """Let the job wait for another machine. Its checkpoints are in its directory.

        Its process may still be running, and own the lock of the directory, until the agent there has ended it.
        """
        lost.agent.close()
        self._start_at[lost.job.number] = time.monotonic() + lost.machine.machines.end_s
        if not lost.machine.is_lost:
            print(f"{lost.machine.name} is lost: {why}", flush=True)
        lost.machine.is_lost = True
        self.waiting.append((lost.job, lost.request))
        self.waiting.sort(key=lambda each: each[0].number)


def _start(sweep: Sweep, job: JobRecord, request: Request, machine: SlotMachine, slots: list[int]) -> RunningJob:
    with contextlib.ExitStack() as opened:
        stderr = opened.enter_context(tempfile.TemporaryFile())
        has_outcome = watch_outcome(job.directory)
        sweep.write_state(job, "running", slots=slots)
        # The lines of its output are in the job's log.txt.
        agent = machine.start(request, slots, subprocess.DEVNULL, stderr)
        opened.pop_all()  # record_ended closes the file
    return RunningJob(job, request, machine, slots, agent, stderr, has_outcome)


def _record_outcome(sweep: Sweep, ended: RunningJob, stderr: str, stopped: bool) -> None:
    """Record and print the outcome of a job. `stopped` is True if it was signaled to stop."""
    ended.agent.close()
    status, run = ended.agent.status or 0, find_run(ended.job.directory)
    if status == 0 and ended.has_outcome():  # otherwise user code has called os._exit(0)
        state = sweep.write_outcome(ended.job, run.metrics)
        text = "  ".join(f"{name} {format_number(value)}" for name, value in run.metrics.items())
    else:
        state = {2: "refused", 143: "preempted"}.get(status, "failed")
        if stopped and status < 0:  # it was killed while it was saving, or had no signal handler yet
            state = "preempted"
        text = stderr if state == "refused" else run.error or stderr or f"exit status {status}"
        sweep.write_state(ended.job, state, error=text)
    print(f"{ended.job.label} {state}  {text}", flush=True)
