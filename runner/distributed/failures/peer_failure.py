"""The record of a job's first failure in the store, and how ranks find out which ranks have died or hang."""

import json
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from runner.distributed.failures.heartbeat import send_signal
from runner.distributed.failures.hung_ranks import STACKS_S, Finding, died, examine
from runner.distributed.local.local_ranks import LocalRanks

PEERS_TIMEOUT_S = 4.0  # for the ranks that wait for the same peer as this one to fail as well
RECORD_TIMEOUT_S = PEERS_TIMEOUT_S + 2 * STACKS_S + 5.0  # for everything that `FirstFailure.record` does
# Errors of gloo and RPC are plain RuntimeErrors, most of which name one of their source files.
PEER_ERRORS = (
    "gloo/",
    "caused pair closure",
    "Connection closed by peer",
    "Connection reset by peer",
    "tensorpipe/",
    "RPC ran for more than set timeout",
)


class PeerMissing(RuntimeError):
    """Another rank no longer responds."""


def is_peer_failure(error: BaseException) -> bool:
    """Return True if the error is about a rank that no longer responds: the rank that raises it is not the cause."""
    if isinstance(error, (dist.DistError, PeerMissing)):
        return True
    if isinstance(error, RuntimeError) and any(text in str(error) for text in PEER_ERRORS):
        return True
    # A pipeline's schedule raises another error, caused by this one.
    return error.__cause__ is not None and is_peer_failure(error.__cause__)


@dataclass(frozen=True)
class FirstFailure:
    """The record of a job's first failure, as one failing rank sees it.

    Keys of the job's store: `failure` is the text of the first failure and the ranks that are missing, `failed/RANK`
    the position of a rank that has failed, `silent` the ranks that do not respond, `examiner/RANK` the rank that
    examines one of these, and `finding/RANK` the result.
    """

    rank: int
    world_size: int
    store: dist.Store
    local_ranks: LocalRanks
    timeout_s: float
    stacks_dir: Path | None  # for the stacks of hung ranks; None before the run directory exists

    def record(self, text: str, position: str, is_peer_failure: bool) -> tuple[str, list[int]]:
        """Record this rank's failure unless another rank was first.

        Returns the text of the first failure, which caused the others, and the ranks that have exited or are killed. If
        a peer failed, the text names the peer. position: of this rank.
        """
        store, missing = self.store, list[int]()
        if store.check([f"examiner/{self.rank}"]):
            # This rank hung until now and is about to be killed, so that its failure is not the cause.
            wait_until(lambda: store.check(["failure"]), 2 * STACKS_S)
        elif is_peer_failure:
            store.set(f"failed/{self.rank}", position)
            wait_until(self._is_cause_known, PEERS_TIMEOUT_S)
            exited, silent = self._exited(), self._silent()
            if not store.check(["failure"]):
                missing = exited or silent
                lines = [died(self.local_ranks.others[rank]) for rank in exited] or self._examine_all(silent)
                text = "\n".join([text, *lines])
        first, missing = json.loads(store.compare_set("failure", "", json.dumps([text, missing])))
        # Not before `failure` is set: a rank that finds that all ranks have failed concludes that none is the cause.
        store.set(f"failed/{self.rank}", position)
        return first, sorted({*missing, *self._exited()})

    def examine(self, rank: int) -> None:
        """Record the result of the examination of a rank on this machine, and kill it, unless another rank does so."""
        process, own = self.local_ranks.all[rank], str(self.rank)
        if self.store.compare_set(f"examiner/{rank}", "", own).decode() == own:
            finding = examine(process, self.timeout_s, self.stacks_dir)
            self.store.set(f"finding/{rank}", json.dumps(finding))
            send_signal(process, signal.SIGKILL)  # the ranks that wait for it continue only now

    def _is_cause_known(self) -> bool:
        """Return True if a rank has exited, which is the cause, or if there is no reason to wait for more failures."""
        return bool(self._exited()) or not self._silent() or any(self.store.check([k]) for k in ("failure", "silent"))

    def _silent(self) -> list[int]:
        """Return the ranks that have not failed."""
        return [rank for rank in range(self.world_size) if not self._has_failed(rank)]

    def _exited(self) -> list[int]:
        """Return the ranks on this machine that have exited without recording a failure."""
        return [rank for rank in self.local_ranks.exited() if not self._has_failed(rank)]

    def _has_failed(self, rank: int) -> bool:
        return self.store.check([f"failed/{rank}"])

    def _examine_all(self, silent: list[int]) -> list[str]:
        """Return the stacks and positions of ranks that do not respond, which are killed. The causes come last.

        Another rank on the same machine examines a silent rank. If there is none, the silent rank's watchdog does so.
        """
        self.store.set("silent", json.dumps(silent))
        start = time.monotonic()
        for rank in self.local_ranks.others.keys() & silent:
            self.examine(rank)
        findings = {rank: self._finding(rank, start + 2 * STACKS_S) for rank in silent}
        causes = [rank for rank in silent if not findings[rank].is_waiting] or silent
        stacks = [findings[rank].stacks for rank in causes if findings[rank].stacks]
        lines = [findings[rank].line for rank in sorted(silent, key=causes.__contains__)]
        return [*stacks, *self._waiting_lines(), *lines]

    def _finding(self, rank: int, deadline: float) -> Finding:
        key = f"finding/{rank}"
        wait_until(lambda: self.store.check([key]), deadline - time.monotonic())
        if self.store.check([key]):
            return Finding(*json.loads(self.store.get(key)))
        host = self.local_ranks.all[rank].host if self.local_ranks.all else "an unknown host"
        return Finding(f"no response from rank {rank} on {host}")

    def _waiting_lines(self) -> list[str]:
        """Return the positions of the ranks that have failed because of a peer, with one line per position."""
        ranks_at: dict[str, list[str]] = {}
        for rank in range(self.world_size):
            if self._has_failed(rank) and (position := self.store.get(f"failed/{rank}").decode()):
                ranks_at.setdefault(position, []).append(str(rank))
        return [
            f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(ranks)} waited for other ranks, {position}"
            for position, ranks in ranks_at.items()
        ]


def wait_until(condition: Callable[[], bool], timeout_s: float) -> None:
    """Wait for the condition, at most `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
