"""A thread that detects the failure of another rank while the loop of this rank waits."""

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from runner.distributed.environment import RankInfo
from runner.distributed.failures.flight_recorder import oldest_pending
from runner.distributed.failures.heartbeat import Heartbeat
from runner.distributed.failures.hung_ranks import save_stacks
from runner.distributed.failures.shutdown import Shutdown
from runner.distributed.local.local_ranks import LocalRanks
from runner.distributed.world_store import WorldStore
from runner.process.daemon_thread import call_in_daemon

POLL_S = 0.5
QUIET_S = 5.0  # the time without a step after which the store is checked for failures


class Watchdog:
    """The watchdog of a rank, which runs from `start` to `stop` in a world of several ranks."""

    def __init__(
        self, rank_info: RankInfo, store: WorldStore, local_ranks: LocalRanks, heartbeat: Heartbeat, shutdown: Shutdown
    ):
        self._rank_info, self._store, self._local_ranks = rank_info, store, local_ranks
        self._heartbeat, self._shutdown = heartbeat, shutdown
        self._callbacks: list[Callable[[str], None]] = []
        self._stopped = threading.Event()
        self._failed_since: float | None = None
        self._started_ns = 0

    def on_peer_failure(self, callback: Callable[[str], None]) -> None:
        """Call `callback(reason)` in the watchdog's thread when another rank dies or fails, to end waits for it."""
        self._callbacks.append(callback)

    def start(self) -> None:
        """Start the thread, once the process group is formed."""
        self._callbacks.clear()
        self._stopped, self._failed_since, self._started_ns = threading.Event(), None, time.time_ns()
        if self._rank_info.world_size > 1:
            call_in_daemon(partial(self._run, self._stopped), "watchdog")

    def stop(self) -> None:
        self._stopped.set()

    def _run(self, stopped: threading.Event) -> None:
        exited: set[int] = set()
        # If the store becomes unreachable, the thread ends: ranks that wait for its machine fail by themselves.
        while not stopped.wait(POLL_S) and not self._shutdown.failed:
            for rank in set(self._local_ranks.exited()) - exited:
                exited.add(rank)
                self._notify(f"rank {rank} has exited", stopped)
            self._check_store(stopped)
            self._check_collectives(bool(exited))

    def _notify(self, reason: str, stopped: threading.Event) -> None:
        for callback in self._callbacks:
            if not stopped.is_set():
                callback(reason)

    def _check_store(self, stopped: threading.Event) -> None:
        """If this rank has made no step for a while, check if another one has failed or waits for this one."""
        store, (_, since_s) = self._store.job, self._heartbeat.last()
        if store is None or since_s < self._quiet_s() or not self._store.is_reachable():
            return
        if store.check(["silent"]) and self._rank_info.rank in json.loads(store.get("silent")):
            self._shutdown.first_failure(store).examine(self._rank_info.rank)
        if not store.check(["failure"]):
            return
        if self._failed_since is None:
            self._failed_since = time.monotonic()
            self._notify("another rank has failed", stopped)
        elif time.monotonic() - self._failed_since > self._shutdown.patience_s and not self._shutdown.failed:
            self._exit_for_loop(json.loads(store.get("failure"))[0])

    def _check_collectives(self, has_lost_peer: bool) -> None:
        """Let this rank fail if its loop waits for its GPU, where a collective waits for another rank for too long."""
        limit_s = self._quiet_s() if has_lost_peer else self._shutdown.timeout_s
        if self._shutdown.failed or self._heartbeat.last()[1] < limit_s:
            return
        pending = oldest_pending(self._started_ns)
        if pending is None or pending.since_s < limit_s:
            return
        what = f"{pending.name} of {pending.shapes} in the group {pending.group}, called at {pending.called_at},"
        text = f"{what} has not completed for {pending.since_s:.0f} s"
        at = f"{pending.called_at}, in {pending.name}"
        self._exit_for_loop(self._shutdown.report_failure(text, is_peer_failure=True, raised_at=at))

    def _quiet_s(self) -> float:
        return min(QUIET_S, self._shutdown.timeout_s / 2)

    def _exit_for_loop(self, failure: str) -> None:
        """Save the stacks, report the failure on one rank, and exit, because the loop does not return from a wait."""
        self._shutdown.failed = True
        try:
            save_stacks(self._heartbeat.start(), self._shutdown.stacks_dir)
            if self._shutdown.is_reporter and not self._shutdown.is_recorded():
                self._shutdown.report_late(failure)
            self._shutdown.report_before_exit(lambda: None)
        finally:
            for stream in (sys.stdout, sys.stderr):
                with suppress(OSError, ValueError):  # the terminal is closed
                    stream.flush()
            os._exit(1)
