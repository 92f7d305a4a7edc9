"""The processes of the ranks: what each of them runs, the signals that are forwarded to them, and their fork server."""

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any

from runner.config.recorded_code import importing_code_of
from runner.config.request import Request
from runner.distributed.backend import as_backend
from runner.distributed.environment import find_rank_info
from runner.distributed.failures import signals
from runner.distributed.membership import JobEnded, Refused, StoreLost
from runner.distributed.rendezvous import join
from runner.errors import InputError, JobFailed, Preempted, exiting_on_system_errors, print_messages
from runner.jobs.equal_input import check_joining
from runner.jobs.job import run_job
from runner.jobs.process_tuning import tune_process
from runner.process.standard_streams import open_streams

Outcome = dict[str, float] | BaseException  # the metrics, or what the job has raised
FAILURE_REPORTED = 75  # exit status of a rank whose failure has been reported; sysexits.h's EX_TEMPFAIL
CUT_OFF = 76  # exit status of a rank that has lost the store, while others may continue
REFUSED = 77  # exit status of a process that must not join the ranks that continue


@exiting_on_system_errors(FAILURE_REPORTED)
def run_rank(request: Request, join_timeout_s: float, source: str) -> Outcome:
    """Run one rank in its own process, in the environment that torch's agent has set. Return its outcome."""
    # From here on the process receives signals, and forks its loader workers itself: a fork server for them would
    # outlive it.
    signals.install_rank_handlers()
    open_streams()
    tune_process()
    multiprocessing.set_start_method(None, force=True)
    # Otherwise a process that a callback forks would keep the launcher's fork server running.
    os.close(forkserver._forkserver._forkserver_alive_fd)  # type: ignore[attr-defined]
    rank_info = replace(
        find_rank_info(),
        source=source,
        restart=0,
        restart_file=f"{request.destination.file}-restart",
        may_grow=request.config.elastic_every_steps is not None,
    )
    try:
        world = join(rank_info, as_backend(request.config.backend), join_timeout_s, partial(_check_joining, request))
    except Refused as error:
        with suppress(FileExistsError):  # another rank of this agent has printed the same
            Path(f"{request.destination.file}-refused").touch(exist_ok=False)
            print_messages([*error.messages, "this process does not join the run, which continues without it"])
        sys.exit(REFUSED)
    except (InputError, Preempted) as error:
        return error
    except JobEnded:
        return {}
    except JobFailed as error:
        print_messages([str(error)])
        sys.exit(FAILURE_REPORTED)
    outcome: Outcome
    try:
        with importing_code_of(request.code_of):
            outcome = run_job(request, world)
    except StoreLost as error:
        print_messages([f"rank {rank_info.rank} stops, and records nothing: {error}"])
        sys.exit(CUT_OFF)
    except JobFailed:
        world.shutdown.report_before_exit(lambda: None)  # the agent terminates the others as soon as one has exited
        sys.exit(FAILURE_REPORTED)  # an agent regards a rank that returns as finished, and waits for other machines
    except (InputError, Preempted, KeyboardInterrupt) as error:
        outcome = error.with_traceback(None)  # its frames refer to the model
    signals.exit_at_once_with_parent()  # the rank waits until torch's agent has read the result
    return outcome


def _check_joining(request: Request, first: Any) -> None:
    with importing_code_of(request.code_of):
        check_joining(request.config, first)


@contextmanager
def forwarding_signals(is_embedded: bool = False, save_s: float | None = None) -> Iterator[list[str]]:
    """Forward signals that request a stop to the ranks; a second Ctrl-C kills them. Without ranks this process exits.

    save_s: seconds after the first signal until ranks that have not exited are killed; None for no limit.
    is_embedded: The process belongs to the caller: Ctrl-C raises KeyboardInterrupt, any other signal a SystemExit.
    Yields the names of the received signals.
    """
    received: list[str] = []
    not_ranks = multiprocessing.active_children()

    def forward(number: int, frame: object) -> None:
        is_interrupt = number == signal.SIGINT
        is_second = is_interrupt and signal.SIGINT.name in received
        received.append(signal.Signals(number).name)
        if number == signal.SIGHUP:
            signals.detach_terminal()
        ranks = [process for process in multiprocessing.active_children() if process.pid and process not in not_ranks]
        for process in ranks:
            # The ranks have received a terminal's Ctrl-C themselves; a SIGTERM is not counted as a second one.
            with suppress(ProcessLookupError):
                os.kill(process.pid or 0, signal.SIGTERM if is_interrupt and not is_second else number)
        if ranks and not is_second:
            if save_s is not None and len(received) == 1:
                timer = threading.Timer(save_s, _kill, [ranks])
                timer.daemon = True
                timer.start()
            return
        deadline = time.monotonic() + signals.EXIT_DELAY_S  # for ranks that record the interruption
        for process in ranks:
            process.join(max(deadline - time.monotonic(), 0.0))
            process.kill()
        if is_embedded:
            raise KeyboardInterrupt if is_interrupt else SystemExit(128 + number)
        raise SystemExit(signals.INTERRUPTED if is_second else signals.PREEMPTED)

    ignored = [number for number in signals.MAY_BE_IGNORED if signal.getsignal(number) is signal.SIG_IGN]
    before = {number: signal.signal(number, forward) for number in signals.STOP_SIGNALS if number not in ignored}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _kill(processes: Sequence[multiprocessing.process.BaseProcess]) -> None:
    for process in processes:
        process.kill()


def start_fork_server() -> None:
    """Start the fork server of the ranks. A signal to the process group must not end it or its resource tracker.

    The server imports torch once for all ranks of all jobs and, unlike this process, has not used a GPU.
    """
    multiprocessing.set_forkserver_preload(["runner.launchers.preload"])
    with signals.signals_blocked():
        resource_tracker.ensure_running()  # it unblocks some signals
    with signals.signals_blocked():
        forkserver.ensure_running()
