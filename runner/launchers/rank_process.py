"""What the launchers that start processes share: a rank's part, and how it ends for the process that started it."""

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import forkserver, resource_tracker
from typing import Any

from runner.config.schema import Config
from runner.distributed.backend import as_backend
from runner.distributed.environment import RankInfo
from runner.distributed.rendezvous import join
from runner.distributed.signals import (
    ASKING,
    INTERRUPTED,
    LAST_WORD_S,
    OFTEN_IGNORED,
    SAVED,
    drop_terminal,
    held_back,
    listen_as_rank,
)
from runner.errors import InputError, JobFailed, Preempted
from runner.launchers.freed_memory import keep_freed_memory
from runner.launchers.imported import end_imports
from runner.launchers.job import run_job
from runner.runs.run_directory import Request

Outcome = dict[str, Any]
# By a fork server, once for the ranks of all jobs; in this order.
PRELOADED = ("runner.launchers.uncollected", "torch._dynamo", "runner.launchers.rank_process")
TOLD = 75  # exit status of a rank whose failure has been told; sysexits.h calls it a temporary one
END_TIMEOUT_S = 15.0  # for the other ranks, once one has died


def run_rank(
    config: Config, request: Request, rank_info: RankInfo, join_timeout_s: float
) -> tuple[Outcome, Callable[[], None]]:
    """Run this rank's part. Returns how it ended, and what leaves the world, to call once that has been passed on."""
    try:
        world = join(rank_info, as_backend(config.backend), join_timeout_s)
    except InputError as error:
        return {"refused": error.messages}, lambda: None
    except Preempted as error:
        return {"preempted": str(error)}, lambda: None
    outcome: Outcome
    try:
        outcome = {"metrics": run_job(config, request, world)}
    except InputError as error:
        outcome = {"refused": error.messages}
    except Preempted as error:
        outcome = {"preempted": str(error)}
    except KeyboardInterrupt:
        outcome = {"interrupted": True}
    except JobFailed as error:
        outcome = {"failed": str(error)}
        world.ending.say_then_continue(lambda: None)  # an agent ends the others as soon as one has ended
    return outcome, world.ending.close


def conclude(outcome: Outcome | None, died: str | None, received: Sequence[str]) -> dict[str, float]:
    """The metrics. Raises what the rank did, which rank 0 has told; received: the signals that asked for an end."""
    if outcome is None and received:
        raise Preempted(received[0])  # before they had begun; they have lost nothing
    if died and "metrics" not in (outcome or {}):
        # A killed rank has said nothing, and rank 0 at most that it misses it.
        print(died, file=sys.stderr, flush=True)
    if outcome is None:
        raise JobFailed(died or "no rank ended with a word")
    if "refused" in outcome:
        raise InputError(*outcome["refused"])
    if "preempted" in outcome:
        raise Preempted(outcome["preempted"])
    if "interrupted" in outcome:
        raise KeyboardInterrupt
    if "failed" in outcome:
        raise JobFailed(outcome["failed"])
    return outcome["metrics"]


@contextmanager
def passing_signals_on(
    processes: Callable[[], Sequence[Any]] = multiprocessing.active_children, is_guest: bool = False
) -> Iterator[list[str]]:
    """Pass signals that ask to stop on to the ranks, which a second Ctrl-C kills. Without ranks this process ends.

    is_guest: it does not end, but has a KeyboardInterrupt. Yields the names of the signals that came.
    """
    received: list[str] = []
    given_up, main = threading.Event(), threading.get_ident()

    def pass_on(number: int, frame: object) -> None:
        is_second = number == signal.SIGINT and signal.SIGINT.name in received
        received.append(signal.Signals(number).name)
        if number == signal.SIGHUP:
            drop_terminal()
        alive = [process for process in processes() if process.is_alive() and process.pid]
        if not alive or given_up.is_set():
            if is_guest:
                raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)
            raise SystemExit(INTERRUPTED if is_second else SAVED)
        for process in alive:
            # A terminal's Ctrl-C has reached the ranks by itself; as a SIGTERM it is not counted as a second one.
            as_first = number == signal.SIGINT and not is_second
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGTERM if as_first else number)
        if is_second and late.ident is None:
            late.start()

    def kill() -> None:
        for process in processes():
            process.kill()
        with suppress(OSError):
            print("the ranks did not end in time after a second Ctrl-C", file=sys.stderr, flush=True)
        if not is_guest:
            os._exit(INTERRUPTED)  # an agent would start them again
        given_up.set()
        signal.pthread_kill(main, signal.SIGINT)

    late = threading.Timer(LAST_WORD_S, kill)
    late.daemon = True
    ignored = [number for number in OFTEN_IGNORED if signal.getsignal(number) is signal.SIG_IGN]
    before = {number: signal.signal(number, pass_on) for number in ASKING if number not in ignored}
    try:
        yield received
    finally:
        late.cancel()
        for number, handler in before.items():
            signal.signal(number, handler)


def start_fork_server(*preloaded: str) -> None:
    """Where the ranks come from, which a signal to the whole process group must not end, nor what tidies up after them.

    It imports torch once for all ranks of all jobs, and unlike a plain fork it has used no GPU.
    """
    multiprocessing.set_forkserver_preload([*PRELOADED, *preloaded])
    with held_back():
        resource_tracker.ensure_running()  # which lets some of them through in here
    with held_back():
        forkserver.ensure_running()


def begin_rank() -> None:
    """For a rank's first line: it hears signals from here on, and its loader's workers are forked from itself.

    multiprocessing would have a fork server of this process's own start them, and that one outlive it.
    """
    listen_as_rank()
    end_imports()
    keep_freed_memory()
    multiprocessing.set_start_method(None, force=True)
