"""The processes of the ranks: what each of them runs, the signals that are forwarded to them, and their fork server."""

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from multiprocessing import forkserver, resource_tracker
from multiprocessing.process import BaseProcess
from typing import Any

from runner.config.schema import Config
from runner.distributed.backend import as_backend
from runner.distributed.environment import find_rank_info
from runner.distributed.failures.signals import (
    EXIT_DELAY_S,
    INTERRUPTED,
    MAY_BE_IGNORED,
    PREEMPTED,
    STOP_SIGNALS,
    detach_terminal,
    exit_at_once_with_parent,
    install_rank_handlers,
    signals_blocked,
)
from runner.distributed.rendezvous import join
from runner.errors import InputError, JobFailed, Preempted
from runner.jobs.job import run_job
from runner.jobs.process_tuning import tune_process
from runner.records.run_directory import Request

Outcome = dict[str, float] | BaseException  # the metrics, or what the job has raised
FAILURE_REPORTED = 75  # exit status of a rank whose failure has been reported; sysexits.h's EX_TEMPFAIL


def run_rank(config: Config, request: Request, join_timeout_s: float, facts: dict[str, Any]) -> Outcome:
    """Run one rank in its own process, in the environment that torch's agent has set. Return its outcome.

    facts: fields of the RankInfo that the environment does not describe.
    """
    # From here on the process receives signals, and its loader workers are forked from itself: a fork server of its own
    # would outlive it.
    install_rank_handlers()
    tune_process()
    multiprocessing.set_start_method(None, force=True)
    rank_info = replace(find_rank_info(), restart=0, restart_file=f"{request.directory_file}-restart", **facts)
    try:
        world = join(rank_info, as_backend(config.backend), join_timeout_s)
    except (InputError, Preempted) as error:
        return error
    outcome: Outcome
    try:
        outcome = run_job(config, request, world)
    except JobFailed:
        world.shutdown.report_before_exit(lambda: None)  # the agent terminates the others as soon as one has exited
        world.shutdown.close()
        sys.exit(FAILURE_REPORTED)  # an agent takes a rank that returns for finished, and waits for other machines
    except (InputError, Preempted, KeyboardInterrupt) as error:
        outcome = error.with_traceback(None)  # its frames refer to the model
    world.shutdown.close()
    exit_at_once_with_parent()  # torch lets the rank wait until the agent has read what it returns
    return outcome


@contextmanager
def forwarding_signals(is_embedded: bool = False) -> Iterator[list[str]]:
    """Forward signals that request a stop to the ranks; a second Ctrl-C kills them. Without ranks this process exits.

    is_embedded: The process belongs to the caller; it does not exit, but KeyboardInterrupt is raised. Yields the names
    of the received signals.
    """
    received: list[str] = []
    has_killed, main = threading.Event(), threading.get_ident()
    not_ranks = multiprocessing.active_children()

    def ranks() -> list[BaseProcess]:
        return [process for process in multiprocessing.active_children() if process not in not_ranks]

    def forward(number: int, frame: object) -> None:
        is_second = number == signal.SIGINT and signal.SIGINT.name in received
        received.append(signal.Signals(number).name)
        if number == signal.SIGHUP:
            detach_terminal()
        alive = [process for process in ranks() if process.pid]
        if not alive or has_killed.is_set():
            if is_embedded:
                raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)
            raise SystemExit(INTERRUPTED if is_second else PREEMPTED)
        for process in alive:
            # The ranks have received a terminal's Ctrl-C themselves; a SIGTERM is not counted as a second one.
            is_first = number == signal.SIGINT and not is_second
            with suppress(ProcessLookupError):
                os.kill(process.pid or 0, signal.SIGTERM if is_first else number)
        if is_second and late.ident is None:
            late.start()

    def kill() -> None:
        for process in ranks():
            process.kill()
        with suppress(OSError):
            print("the ranks did not exit in time after a second Ctrl-C", file=sys.stderr, flush=True)
        if not is_embedded:
            os._exit(INTERRUPTED)
        has_killed.set()
        signal.pthread_kill(main, signal.SIGINT)

    late = threading.Timer(EXIT_DELAY_S, kill)
    late.daemon = True
    ignored = [number for number in MAY_BE_IGNORED if signal.getsignal(number) is signal.SIG_IGN]
    before = {number: signal.signal(number, forward) for number in STOP_SIGNALS if number not in ignored}
    try:
        yield received
    finally:
        late.cancel()
        for number, handler in before.items():
            signal.signal(number, handler)


def start_fork_server() -> None:
    """Start the fork server of the ranks, which a signal to the process group must not end, nor its resource tracker.

    It imports torch once for all ranks of all jobs and, unlike this process, has not used a GPU.
    """
    multiprocessing.set_forkserver_preload(["runner.launchers.preload"])
    with signals_blocked():
        resource_tracker.ensure_running()  # it unblocks some signals in here
    with signals_blocked():
        forkserver.ensure_running()
