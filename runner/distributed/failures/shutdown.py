"""The end of a job on all ranks: the first failure is reported as the cause, once, before any rank exits."""

import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch.distributed as dist

from runner.distributed.environment import RankInfo
from runner.distributed.failures.heartbeat import Heartbeat, send_signal, state_of
from runner.distributed.failures.hung_ranks import KILLED, describe, died, no_response
from runner.distributed.failures.peer_failure import RECORD_TIMEOUT_S, FirstFailure, wait_until
from runner.distributed.failures.signals import PARENT_EXITED, received
from runner.distributed.local.local_ranks import LocalRanks
from runner.distributed.store_consensus import REPORT_TIMEOUT_S
from runner.distributed.world_store import WorldStore
from runner.errors import JobFailed

PATIENCE_S = 5.0  # in which a loop that waits for a failed rank may raise an error by itself


class Shutdown:
    """This rank's part in the end of a job and of its world."""

    def __init__(self, rank_info: RankInfo, store: WorldStore, local_ranks: LocalRanks, heartbeat: Heartbeat):
        self._rank_info, self._store, self._local_ranks, self._heartbeat = rank_info, store, local_ranks, heartbeat
        self.begin_job(0.0)

    def begin_job(self, timeout_s: float) -> None:
        """Reset the state for a new job. timeout_s: of the backend."""
        self.timeout_s = timeout_s
        self.failed = False  # on this rank
        # This rank reports to the user. It is rank 0, or the lowest running rank if rank 0 died or hangs.
        self.is_reporter = self._rank_info.rank == 0
        self._reporter, self._missing = 0, list[int]()  # ranks that were killed, or are on an unreachable machine
        self.patience_s = PATIENCE_S  # from another rank's failure until the watchdog terminates this rank
        # See `begin_run`; these are the values before the run directory exists.
        self.stacks_dir: Path | None = None
        self.report_late: Callable[[str], None] = lambda text: None
        self.is_recorded: Callable[[], bool] = lambda: True

    def begin_run(
        self, stacks_dir: Path, report_late: Callable[[str], None], is_recorded: Callable[[], bool], may_repeat: bool
    ) -> None:
        """Set what the end of a job needs of its run directory.

        Args:
            stacks_dir: For the stacks of hung ranks.
            report_late: Reports and records a failure in place of a loop that hangs, or of rank 0.
            is_recorded: Returns True if a rank has recorded the end of the job; a rank reports the end before.
            may_repeat: The ranks may repeat the job after a failure, so that none may exit.
        """
        self.stacks_dir, self.report_late, self.is_recorded = stacks_dir, report_late, is_recorded
        if may_repeat:
            self.patience_s = self.timeout_s

    def fail_without_run(self, is_reporter: bool) -> None:
        """Let this rank fail because ranks are missing before the run directory exists."""
        self.failed, self.is_reporter = True, is_reporter

    def first_failure(self, store: dist.Store) -> FirstFailure:
        """Return the job's record of its first failure. store: the job's keys."""
        info = self._rank_info
        return FirstFailure(info.rank, info.world_size, store, self._local_ranks, self.timeout_s, self.stacks_dir)

    def report_failure(self, text: str, is_peer_failure: bool = False, raised_at: str = "") -> str:
        """Record why this rank fails. Return the text of the first failure of all ranks, which caused the others."""
        self.failed = True
        if self._rank_info.world_size == 1:
            return text
        position = f"{describe(*self._heartbeat.last())}, at {raised_at}" if raised_at else ""
        recorded = self._store.call(
            lambda store: self.first_failure(store).record(text, position, is_peer_failure), RECORD_TIMEOUT_S
        )
        if recorded is None:
            return self._failure_without_store(text)
        text, self._missing = recorded
        self._reporter = min(set(range(self._rank_info.world_size)) - set(self._missing), default=0)
        self.is_reporter = self._rank_info.rank == self._reporter and (self._reporter == 0 or not self._is_reported())
        return text

    def takes_over_report(self) -> bool:
        """Return True if this rank must report the failure because the reporting rank has exited or hangs.

        Call it after leaving the process group: a rank that is being killed loses its connections before it has exited.
        """
        if self.is_reporter:
            self._store.call(lambda store: store.set("reported", ""))
            return False
        wait_until(lambda: self._reporter in self._local_ranks.exited() or self._is_reported(), REPORT_TIMEOUT_S)
        if self._is_reported():
            return False
        self._reporter = self._local_ranks.lowest_running(excluding=self._reporter)
        # An exited rank may have recorded the failure since the last check.
        self.is_reporter = self._rank_info.rank == self._reporter and not self._is_reported()
        return self.is_reporter

    def report_stop(self, reason: str) -> None:
        """Let the other ranks know that a signal stops this rank at a point where they do not expect it."""
        self.failed = True
        self._store.announce_stop(reason)

    def wait_for_all(self) -> None:
        """Wait until all ranks have called this method, which they do once the job has ended on them without a failure.

        Raise JobFailed if another rank fails, stops or exits instead, or does not call it within the timeout.
        """
        store, failure = self._store.job, ""
        if store is None or not self._store.is_reachable():  # the store may have exited with the launcher
            return
        keys = [f"ended/{rank}" for rank in range(self._rank_info.world_size)]
        deadline, pause_s, exited = time.monotonic() + self.timeout_s, 0.001, list[int]()
        with suppress(RuntimeError):  # the process of the store has exited
            store.set(keys[self._rank_info.rank], "")
            while not failure:
                # Before the check of the keys, because a rank may exit right after the last of them is set.
                exited = self._local_ranks.exited()
                if store.check(keys):
                    return
                if exited or store.check(["failure"]) or store.check(["late"]) or self._store.stop_reason():
                    failure = "another rank did not end well"
                elif time.monotonic() > deadline:
                    store.set("late", "")  # so that the other waiting ranks fail too, and are not reported as hung
                    late = ", ".join(key.removeprefix("ended/") for key in keys if not store.check([key]))
                    failure = f"rank {late} did not end within backend.timeout_s={self.timeout_s:g} s after this rank"
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, 0.02)
        if failure or exited:
            raise JobFailed(failure or "another rank has exited", follows=True)

    def stop_reason(self) -> str | None:
        """Return why a missing rank has stopped; None if no signal has stopped it."""
        reason = self._store.call(lambda _: self._store.stop_reason() or "")
        if reason is None:  # the store may have exited together with the process that started the ranks
            return PARENT_EXITED if received() == PARENT_EXITED else None
        return reason or None

    def report_before_exit(self, report: Callable[[], None]) -> None:
        """Call `report` on the reporting rank; the other ranks wait until it has, or for at most REPORT_TIMEOUT_S.

        A launcher that sees one rank exit with an error terminates the others at once, also in the middle of a report.
        """
        if self.is_reporter:
            report()
        root = self._store.root
        if root is None:
            return
        with suppress(RuntimeError):
            if self.is_reporter:
                root.set("exiting", "")
            else:  # an agent may terminate the reporting rank as soon as that has reported
                wait_until(
                    lambda: self._reporter in self._local_ranks.exited() or root.check(["exiting"]), REPORT_TIMEOUT_S
                )

    def close(self) -> None:
        """Leave the store. The rank that serves it first waits until the others have left, at most REPORT_TIMEOUT_S."""
        root = self._store.root
        if root is None:
            return
        with suppress(RuntimeError):
            root.set(f"closed/{self._rank_info.rank}", "")
            if self._rank_info.hosts_store:
                ranks = set(range(self._rank_info.world_size)) - set(self._missing)
                keys = [f"closed/{rank}" for rank in ranks]
                wait_until(lambda: root.check(keys) or self._is_last(), REPORT_TIMEOUT_S)
        self._store.disconnect()

    def _failure_without_store(self, text: str) -> str:
        """Return the failure and the state of the ranks on this machine, whose lowest running rank reports it."""
        info, local, exited = self._rank_info, self._local_ranks.others, self._local_ranks.exited()
        self._reporter = self._local_ranks.lowest_running()
        self.is_reporter = info.rank == self._reporter
        lines = [text, *(died(local[rank]) for rank in exited)]
        stopped = [process for process in local.values() if state_of(process) == "stopped"]
        for process in stopped if self.is_reporter else []:  # one of them may serve the store
            lines.append(f"{no_response(process, self.timeout_s, 'stopped')}; {KILLED}")
            send_signal(process, signal.SIGKILL)  # before it can continue, and report a failure of its own
        if not exited or info.world_size > 1 + len(local):
            address = f"{info.master_addr}:{info.master_port}"
            lines.append(f"the ranks' store at {address} does not respond: its machine is down or unreachable")
            if (first := self._local_ranks.all.get(0)) is not None and 0 not in {info.rank, *local}:
                lines.append(f"no response from rank 0 on {first.host}")  # which is usually that machine
        return "\n".join(lines)

    def _is_reported(self) -> bool:
        """Return True if a rank has reported the failure. On a full disk, it cannot record its report."""
        return self.is_recorded() or bool(self._store.call(lambda store: store.check(["reported"])))

    def _is_last(self) -> bool:
        num_others = self._rank_info.world_size - 1
        return 0 < num_others == len(self._local_ranks.others) == len(self._local_ranks.exited())
