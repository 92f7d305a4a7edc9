"""The ranks of this machine, started by torch's elastic agent: one world after another, until the job ends."""

import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch.distributed.elastic.agent.server import RunResult, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousHandler

from runner.distributed.failures.hung_ranks import KILLED
from runner.distributed.failures.signals import PREEMPTED
from runner.errors import JobFailed, Preempted, print_messages
from runner.jobs.restart_policy import (
    FailedStart,
    FailureReport,
    describe_death,
    describe_restart,
    newest_step,
    refusal,
)
from runner.launchers.node_rendezvous import Rendezvous
from runner.launchers.rank_process import FAILURE_REPORTED, Outcome
from runner.records.run_directory import Request

TORCH_LOGGERS = ("torch.distributed.elastic", "torch.multiprocessing.spawn")
UNUSED_SIGNAL = "SIGXCPU"  # torch's agent terminates everything at its signals, and needs at least one


@dataclass(frozen=True)
class Ranks:
    """What the agent starts on this machine: a function or a command in each of `num` processes.

    Attributes:
        first: The first one's rank, if the agent numbers its ranks from 0 on every machine.
        signals: Names of the signals at which the agent terminates the ranks and raises SignalException.
    """

    num: int
    entrypoint: Callable[..., Any] | str
    args: Sequence[Any]
    first: int = 0
    signals: str = UNUSED_SIGNAL


class RankDied(JobFailed):
    """A rank of this machine exited without reporting a failure."""


def run_worlds(
    rendezvous: Rendezvous, ranks: Ranks, request: Request, max_restarts: int, received: Sequence[str]
) -> dict[str, float]:
    """Run the job to its end, restarting its world while it makes progress. Return the metrics of the first rank here.

    A failure on another machine, or a machine that joins, begins the next world as well, and is not counted here.

    received: The signals so far that request a stop. Raises InputError, Preempted, JobFailed, KeyboardInterrupt,
    or an error of the rendezvous.
    """
    try:
        metrics = _run_worlds(rendezvous, ranks, request, max_restarts, received)
    except SignalException:
        raise  # the ranks save and exit; the other machines must not take a closed rendezvous for a failure
    except BaseException:
        rendezvous.close()
        raise
    rendezvous.close()
    return metrics


def _run_worlds(
    rendezvous: Rendezvous, ranks: Ranks, request: Request, max_restarts: int, received: Sequence[str]
) -> dict[str, float]:
    starts: list[FailedStart] = []
    while True:
        attempt = rendezvous.join()
        step, report = newest_step(run_directory(request)), FailureReport(lambda: run_directory(request))
        try:
            outcome = _outcome(_run_agent(attempt, ranks), report, ranks.first)
        except RendezvousClosedError:
            rendezvous.leave()
            continue
        if isinstance(outcome, dict):
            return outcome
        rendezvous.leave()
        died, reason = isinstance(outcome, RankDied), None
        if died and received:
            raise Preempted(received[0])  # the rank had not begun; nothing is lost
        if isinstance(outcome, JobFailed) and max_restarts and not received:
            starts.append(FailedStart(step, str(outcome)))
            reached = newest_step(run_directory(request))
            reason = refusal(starts, reached, max_restarts)
            if reason is None:
                if died or rendezvous.is_first:
                    print_messages([describe_restart(str(outcome), reached)])
                continue
            print_messages([reason])
        if died:
            print(outcome, file=sys.stderr, flush=True)
        raise JobFailed(f"{outcome}\n{reason}") if reason else outcome


def _run_agent(rendezvous: RendezvousHandler, ranks: Ranks) -> RunResult:
    """Start the ranks of one world with torch's elastic agent, and wait until they have exited.

    The agent itself restarts nothing: its restarts are counted over the whole run, not from each checkpoint, and leave
    the keys of the earlier ranks in their store.
    """
    for name in TORCH_LOGGERS:  # failures are reported by the runner
        logging.getLogger(name).setLevel(logging.CRITICAL)
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = ranks.signals
    spec = WorkerSpec(
        role="rank",
        local_world_size=ranks.num,
        rdzv_handler=rendezvous,
        entrypoint=ranks.entrypoint,
        args=tuple(ranks.args),
        max_restarts=0,
        monitor_interval=0.05,
    )
    agent = LocalElasticAgent(spec, DefaultLogsSpecs(log_dir=os.devnull), start_method="forkserver")
    result = agent.run()
    if result is None:  # the other machines have finished without this one
        raise RendezvousClosedError
    return result


def _outcome(result: RunResult, report: FailureReport, first_rank: int) -> Outcome:
    if not result.failures:
        return next(iter(result.return_values.values()), None) or {}  # a command returns None
    rank, failure = ChildFailedError("", result.failures).get_first_failure()
    if failure.exitcode == PREEMPTED:
        return Preempted()
    reason = report.read()
    # A rank that the others have terminated is not the cause.
    if failure.exitcode == FAILURE_REPORTED or (reason and (failure.exitcode > 0 or KILLED in reason)):
        return JobFailed(reason or "a rank has reported the reason above")
    return RankDied(describe_death(first_rank + rank, failure.exitcode))


@contextmanager
def recording_directory(request: Request) -> Iterator[Request]:
    """Yield the request with a file into which the ranks of this machine write the path of the run directory."""
    with TemporaryDirectory() as folder:
        yield replace(request, directory_file=request.directory_file or str(Path(folder, "directory")))


def run_directory(request: Request) -> str | None:
    """Return the run directory if it is known on this machine."""
    file = Path(request.directory_file) if request.directory_file else None
    return file.read_text() if file and file.exists() else request.directory
