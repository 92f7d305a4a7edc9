"""What the launchers that start processes share: a rank's part, and how it ends for the process that started it."""

import multiprocessing
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from runner.config.schema import Config
from runner.distributed.backend import as_backend
from runner.distributed.environment import RankInfo
from runner.distributed.rendezvous import join
from runner.distributed.signals import ASKING
from runner.errors import InputError, JobFailed, Preempted
from runner.launchers.job import run_job
from runner.runs.run_directory import Request

Outcome = dict[str, Any]
PRELOADED = (
    "torch._dynamo",
    "runner.launchers.rank_process",
)  # by a fork server, once for the ranks of all jobs
END_TIMEOUT_S = 15.0  # for the other ranks, once one has died
CTRL_C_GRACE_S = 9.0


def run_rank(
    config: Config, request: Request, rank_info: RankInfo, join_timeout_s: float
) -> tuple[Outcome, Callable[[], None]]:
    """Run this rank's part. Returns how it ended, and what leaves the world, to call once that has been passed on."""
    try:
        world = join(rank_info, as_backend(config.backend), join_timeout_s)
    except InputError as error:
        return {"refused": error.messages}, lambda: None
    outcome: Outcome
    try:
        outcome = {"metrics": run_job(config, request, world)}
    except InputError as error:
        outcome = {"refused": error.messages}
    except Preempted as error:
        outcome = {"preempted": str(error)}
    except JobFailed as error:
        outcome = {"failed": str(error)}
        world.ending.say_then_continue(lambda: None)  # an agent ends the others as soon as one has ended
    return outcome, world.ending.close


def conclude(outcome: Outcome | None, died: str | None, received: Sequence[str]) -> dict[str, float]:
    """The metrics. Raises what the rank did, which rank 0 has told; received: the signals that asked for an end."""
    if outcome is None and received:
        raise Preempted(received[0])  # before the ranks had handlers for it; they have lost nothing
    if died and "metrics" not in (outcome or {}):
        # A killed rank has said nothing, and rank 0 at most that it misses it.
        print(died, file=sys.stderr, flush=True)
    if outcome is None:
        raise JobFailed(died or "no rank ended with a word")
    if "refused" in outcome:
        raise InputError(*outcome["refused"])
    if "preempted" in outcome:
        raise Preempted(outcome["preempted"])
    if "failed" in outcome:
        raise JobFailed(outcome["failed"])
    return outcome["metrics"]


def how_it_died(rank: int, exit_code: int) -> str:
    """A line about a rank that ended without a word."""
    how = signal.Signals(-exit_code).name if exit_code < 0 else f"exit status {exit_code}"
    return f"rank {rank} on {socket.gethostname()} died: {how}"


@contextmanager
def passing_signals_on(
    processes: Callable[[], Sequence[Any]] = multiprocessing.active_children, is_guest: bool = False
) -> Iterator[list[str]]:
    """Pass signals that ask to stop on to the ranks; after a Ctrl-C they have 9 s. Without ranks this one ends.

    is_guest: it does not end, but has a KeyboardInterrupt. Yields the names of the signals that came.
    """
    received: list[str] = []
    given_up, main = threading.Event(), threading.get_ident()

    def pass_on(number: int, frame: object) -> None:
        received.append(signal.Signals(number).name)
        alive = [process for process in processes() if process.is_alive() and process.pid]
        if not alive or given_up.is_set():
            raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)
        for process in alive:
            # A terminal's Ctrl-C has reached the ranks by itself; as a SIGTERM it is not counted as a second one.
            os.kill(process.pid, signal.SIGTERM if number == signal.SIGINT else number)
        if number == signal.SIGINT and late.ident is None:
            late.start()

    def kill() -> None:
        for process in processes():
            process.kill()
        print("the ranks did not end in time after a Ctrl-C", file=sys.stderr, flush=True)
        if not is_guest:
            os._exit(130)  # an agent would start them again
        given_up.set()
        signal.pthread_kill(main, signal.SIGINT)

    late = threading.Timer(CTRL_C_GRACE_S, kill)
    late.daemon = True
    before = {number: signal.signal(number, pass_on) for number in ASKING}
    try:
        yield received
    finally:
        late.cancel()
        for number, handler in before.items():
            signal.signal(number, handler)
