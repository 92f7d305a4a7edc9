"""The ranks of this machine, started by torch's elastic agent: one world after another, until the job ends."""

import logging
import multiprocessing
import os
import re
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch.distributed.elastic.agent.server import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, MultiprocessContext
from torch.distributed.elastic.multiprocessing.api import _wrap
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousHandler

from runner.checkpoints.layout import list_checkpoints, step_of
from runner.distributed.failures.hung_ranks import KILLED
from runner.distributed.failures.signals import PREEMPTED, signals_deferred
from runner.distributed.membership import Refused
from runner.errors import JobFailed, Preempted, print_messages
from runner.launchers.node_rendezvous import Rendezvous
from runner.launchers.rank_process import CUT_OFF, FAILURE_REPORTED, REFUSED, Outcome
from runner.records.attempts import error_line
from runner.records.run_directory import CHECKPOINTS, Destination
from runner.records.run_record import DONE, find_run, report_failure, result_mtime_ns

UNUSED_SIGNAL = "SIGXCPU"  # torch's agent needs a signal at which it terminates all ranks; others are forwarded


@dataclass(frozen=True)
class Ranks:
    """The `num` processes that the agent starts on this machine, each of which runs a function or a command."""

    num: int
    entrypoint: Callable[..., Any] | str
    args: Sequence[Any]
    max_replaced: int | None = None  # the lost ranks that are replaced while others continue; None: all end with one
    are_stopped_together: bool = False  # the agents of all machines receive a signal to stop


class _Agent(LocalElasticAgent):
    """torch's agent, with four differences.

    A rank that exits with status 0 before its function returns has failed: torch would wait for its return value
    forever. Signals are handled once all ranks have been started: otherwise, this process would exit without the rank
    that it is starting, which would then fail to open semaphores that no longer exist. If the ranks can continue
    without one that is killed, it is replaced, `max_replaced` times (None: never), or left out: torch would end all.
    A process that the ranks refuse is left out.
    The agent then serves the store until the ranks of all machines have exited, also after a signal to all of them.
    """

    max_replaced: int | None = None
    are_stopped_together = False
    _has_refused = False  # a process of this machine was not accepted as a rank

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        with signals_deferred():
            started: dict[int, Any] = super()._start_workers(worker_group)
        context = self._pcontext
        if self.max_replaced is not None and isinstance(context, MultiprocessContext) and context._pc is not None:
            join = context._pc.join
            vars(context._pc)["join"] = lambda *timeout: not self._replace_killed(context) and join(*timeout)
        return started

    def _replace_killed(self, context: MultiprocessContext) -> bool:
        """Replace the ranks that were killed. Return True if there were any, and the others continue."""
        assert context._pc is not None and self.max_replaced is not None
        ranks = context._pc
        is_running = any(process.exitcode is None for process in ranks.processes)
        exits = {number: ranks.processes[number].exitcode or 0 for number in ranks.sentinels.values()}
        killed = [number for number, status in exits.items() if status < 0 or status in (CUT_OFF, REFUSED)]
        pids = [ranks.pids()[number] for number in killed]
        if not killed or not self._rendezvous_of_world.continues_without(pids, is_running):
            return False
        for number in killed:
            del ranks.sentinels[ranks.processes[number].sentinel]
            if is_refused := exits[number] == REFUSED:
                self._has_refused = True
            if self.max_replaced == 0 or is_refused:
                context._return_values[number] = None
                continue
            self.max_replaced -= 1
            with signals_deferred():
                ranks.processes[number] = _start_rank(context, number)
            ranks.sentinels[ranks.processes[number].sentinel] = number
            self._worker_group.workers[number].id = ranks.processes[number].pid
        return True

    @property
    def _rendezvous_of_world(self) -> Any:
        return self._worker_group.spec.rdzv_handler

    def _exit_barrier(self) -> None:
        if self.max_replaced is None:
            super()._exit_barrier()
        elif isinstance(self._pcontext, MultiprocessContext):  # torch would wait for machines that are lost
            with signals_deferred() if self.are_stopped_together else nullcontext():
                has_outcome = any(self._pcontext._return_values.values())
                self._rendezvous_of_world.end_together(has_outcome, self._has_refused)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result: RunResult = super()._monitor_workers(worker_group)
        context = self._pcontext
        if result.state == WorkerState.HEALTHY and isinstance(context, MultiprocessContext) and context._pc is not None:
            # A rank whose function has returned waits in its process until all ranks of this machine have returned.
            for local_rank, process in enumerate(context._pc.processes):
                if process.exitcode == 0:
                    failure = ProcessFailure(local_rank, process.pid, 0, error_file="")
                    return RunResult(WorkerState.FAILED, {}, {worker_group.workers[local_rank].global_rank: failure})
        return result


def _start_rank(context: MultiprocessContext, number: int) -> Any:
    """Start a process for a rank of this machine, as torch has started the first one."""
    starting: Any = multiprocessing.get_context(context.start_method)
    process = starting.Process(
        target=_wrap,
        args=(
            number,
            context.entrypoint,
            context.args,
            context.envs,
            context.stdouts,
            context.stderrs,
            context._ret_vals,
            context._worker_finished_event,
            context._numa_options,
        ),
    )
    process.start()
    return process


class RankDied(JobFailed):
    """A rank of this machine exited without reporting a failure."""


def run_worlds(
    rendezvous: Rendezvous, ranks: Ranks, destination: Destination, max_restarts: int, received: Sequence[str]
) -> dict[str, float]:
    """Run the job to its end, restarting its world while it makes progress.

    A failure on another machine, or a machine that joins, also starts the next world, but is not counted here.
    Returns the metrics of this machine's first rank.

    received: The signals so far that request a stop. Raises InputError, Preempted, JobFailed, KeyboardInterrupt,
    or an error of the rendezvous. Raises Refused if this machine may not join the others, which continue.
    """
    failures, continues = list[str](), False  # since the newest checkpoint; if the others continue without this machine
    try:
        while True:
            attempt = rendezvous.join()
            step, before = _newest_step(destination.find()), result_mtime_ns(destination.find())
            try:
                result = _run_agent(attempt, ranks)
                outcome = _outcome(result, reported_failure(destination.find(), before))
            except RendezvousClosedError:
                rendezvous.leave()
                continue
            except Refused:
                continues = True
                raise
            if isinstance(outcome, dict):
                is_elsewhere = not outcome and ranks.max_replaced is not None
                return _metrics_elsewhere(destination.find()) if is_elsewhere else outcome
            rendezvous.leave()
            died, reason = isinstance(outcome, RankDied), None
            if died and received:
                raise Preempted(received[0])  # the rank had not started its job; nothing is lost
            if isinstance(outcome, JobFailed) and max_restarts and not received:
                reached = _newest_step(destination.find())
                failures = [*(failures if reached == step else ()), str(outcome)]
                reason = refusal(failures, reached, max_restarts)
                if died or rendezvous.is_first or reason:
                    print_messages([reason or f"{_summary(failures[-1])}: restarted from {_describe_step(reached)}"])
                if reason is None:
                    continue
            if died and (directory := destination.find()):
                report_failure(Path(directory), str(outcome))  # the ranks may not have been able to record it
            elif died:
                print_messages([str(outcome)])
            raise JobFailed(f"{outcome}\n{reason}") if reason else outcome
    finally:
        if not continues:
            rendezvous.close()


def _run_agent(rendezvous: RendezvousHandler, ranks: Ranks) -> RunResult:
    """Start the ranks of one world with torch's elastic agent, and wait until they have exited.

    The agent itself does not restart ranks: it would count the restarts over the whole run, not from each checkpoint,
    and would leave the keys of the earlier ranks in their store.
    """
    for name in ("torch.distributed.elastic", "torch.multiprocessing.spawn"):  # failures are reported by the runner
        logging.getLogger(name).setLevel(logging.CRITICAL)
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = UNUSED_SIGNAL
    spec = WorkerSpec(
        role="rank",
        local_world_size=ranks.num,
        rdzv_handler=rendezvous,
        entrypoint=ranks.entrypoint,
        args=tuple(ranks.args),
        max_restarts=0,
        monitor_interval=0.05,
    )
    agent = _Agent(spec, DefaultLogsSpecs(log_dir=os.devnull), start_method="forkserver")
    agent.max_replaced, agent.are_stopped_together = ranks.max_replaced, ranks.are_stopped_together
    try:
        result: RunResult | None = agent.run()
    except EOFError:  # the fork server could not start a rank, has reported the reason, and has exited
        raise JobFailed("the ranks could not be started, because their fork server has exited") from None
    if result is None:  # the other machines have finished without this machine
        raise RendezvousClosedError
    return result


def _outcome(result: RunResult, reason: str) -> Outcome:
    """Return the outcome of a world. `reason` is the failure that its ranks have reported."""
    if not result.failures:
        # A command returns None, and a rank that was lost, or that no world needed, has no result.
        return next((value for value in result.return_values.values() if value), {})
    rank, failure = ChildFailedError("", result.failures).get_first_failure()
    if failure.exitcode == PREEMPTED:
        return Preempted()
    # A rank that was terminated because another one failed is not the cause.
    if failure.exitcode in (FAILURE_REPORTED, CUT_OFF) or (reason and (failure.exitcode > 0 or KILLED in reason)):
        return JobFailed(reason or "a rank has reported the reason above")
    how = signal.Signals(-failure.exitcode).name if failure.exitcode < 0 else f"exit status {failure.exitcode}"
    return RankDied(f"rank {rank} on {socket.gethostname()} died: {how}")


def _metrics_elsewhere(directory: str | None) -> dict[str, float]:
    """Return the metrics of a run that has ended on other machines. Raise Preempted or JobFailed, as it has ended.

    directory: of the run; None if no rank of this machine belonged to it.
    """
    if directory is None:
        return {}
    run = find_run(Path(directory))
    if run.state == "preempted":
        raise Preempted
    if run.state not in DONE:
        how = f"the run has failed: {_summary(run.error)}" if run.error else "the run has no ranks left"
        text = f"{how}; continue with resume={directory}"
        print_messages([text])
        raise JobFailed(text)
    return run.metrics


def reported_failure(directory: str | None, before: int | None) -> str:
    """Return the failure in result.json; empty if it has none, or has not changed since the time `before`."""
    if directory and result_mtime_ns(directory) != before and (run := find_run(Path(directory))).state == "failed":
        return run.error or ""
    return ""


def refusal(failures: Sequence[str], step: int, max_restarts: int) -> str | None:
    """Return why the world is not restarted after these failures since the checkpoint of `step`; None if it is."""
    without = f"without getting beyond {_describe_step(step)}"
    if len(failures) > 1 and _cause(failures[-2]) == _cause(failures[-1]):
        return f"not restarted: it failed twice in the same way, {without}"
    if len(failures) > max_restarts:
        return f"not restarted: launcher.max_restarts={max_restarts} reached, {without}"
    return None


def _summary(failure: str) -> str:
    """Return the report's first line, which names the rank, and the line that names the error."""
    return " ".join(dict.fromkeys((failure.strip().splitlines()[0], (error_line(failure) or "").strip())))


def _cause(failure: str) -> str:
    """Return the report without the rank, its process and the frames, which differ between failures of one cause."""
    lines = failure.strip().splitlines()
    cause = [line for line in lines[1:] if not line.startswith(" ")] or lines
    return re.sub(r"\bprocess \d+", "process", "\n".join(cause))


def _newest_step(directory: str | None) -> int:
    """Return the step of the newest checkpoint; 0 if none exists or the file system does not respond."""
    with suppress(OSError):
        if directory and (checkpoints := list_checkpoints(Path(directory) / CHECKPOINTS)):
            return step_of(checkpoints[-1])
    return 0


def _describe_step(step: int) -> str:
    return f"step {step}" if step else "the beginning"


@contextmanager
def recording_directory(destination: Destination) -> Iterator[Destination]:
    """Yield the destination with a file into which the ranks of this machine write the path of the run directory."""
    with TemporaryDirectory() as temporary:
        yield replace(destination, file=destination.file or str(Path(temporary, "directory")))
