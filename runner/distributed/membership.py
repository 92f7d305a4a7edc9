"""The members of a world that loses and gains ranks during a job, and the copies of the state that they keep."""

import json
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from runner.distributed.environment import RankInfo
from runner.distributed.failures.heartbeat import RankProcess, send_signal, state_of
from runner.distributed.failures.hung_ranks import examine
from runner.distributed.failures.signals import received
from runner.errors import InputError, JobFailed, Preempted, quantity

POLL_S = 0.01
JOIN_POLL_S = 0.5  # between checks for processes that wait to join
BEAT_S = 1.0  # between the signs of life of a rank
SILENT_S = 5.0  # without one, until a rank on another machine counts as lost, while the next world is formed
KEYS = "elastic"  # in front of each key in the store of the ranks
FIRST = "members/0"  # the key that is set once the ranks of the first world can lose a member
ENDED = "ended"  # the key that is set once the job is over


class Regroup(Exception):
    """The ranks have to form another world, because one of them was lost or another process waits to join."""


class JobEnded(Exception):
    """The job ended before this process could join it."""


class Refused(InputError):
    """This process would compute something else than the ranks that it wants to join, which continue without it."""


class StoreLost(JobFailed):
    """This process no longer reaches the store, and does not know if others continue: it must not write to the run."""


@dataclass(frozen=True)
class Copy:
    """The state of the job after `step` steps, in this process."""

    step: int
    content: Any
    at: float = field(default_factory=time.monotonic)  # when this process was in this state


@dataclass(frozen=True)
class Member:
    """A process that belongs to a world, or wants to."""

    process: RankProcess
    confirmed: int | None = None  # the step of a copy that every rank of the world before has, and has gone beyond
    kept: tuple[int, ...] = ()  # the steps of all copies of this process

    @classmethod
    def parse(cls, text: str | bytes) -> "Member":
        facts = json.loads(text)
        return cls(RankProcess(*facts["process"]), facts["confirmed"], tuple(facts["kept"]))


class Membership:
    """This process's part in the worlds of a job: which processes form each, and what it needs to continue.

    The first world has the number 0. Keys of the store: `members/N` lists the members of world N, and the step of the
    copy from which it continues; `here/N/RANK` is what a rank of world N - 1 brings to world N; `candidate/I` is the
    I-th process that waits to join; `gone/HOST/PID` is set by the agent of a machine when a process was killed there;
    `beats` counts the signs of life of all ranks, and `beats/HOST/PID` those of one; `ended` is set when the job is
    over.
    """

    def __init__(self, store: dist.Store, own: RankProcess, timeout_s: float):
        """own: this process. timeout_s: for a rank on another machine to respond."""
        self._store, self._own, self._timeout_s = dist.PrefixStore(KEYS, store), own, timeout_s
        self._members: list[Member] = []  # of this world
        self._num_candidates = 0  # those that had registered when this world was formed
        self._is_awaited, self._checked_at = False, 0.0
        self.number = 0
        self.copies: list[Copy] = []  # at most two, the newest last
        self.confirmed: int | None = None
        self.reason, self.left_at = "", 0.0  # why this world was formed, and when the one before it was left
        self.start_step: int | None = None  # of the copy from which this world continues; None: it has none
        self.copied_at: float | None = None  # when this process made that copy; None: it has none
        self.facts: Any = None  # a value for JSON: what determines the results of this rank of the first world

    def begin(self, processes: Sequence[RankProcess]) -> None:
        """Start the first world, which consists of these processes, by rank."""
        self._members = [Member(process) for process in processes]
        if self._own.rank == 0:
            first = {"members": [_text(member) for member in self._members], "facts": self.facts}
            self._store.set(FIRST, json.dumps(first))

    def first_facts(self) -> Any:
        """Return `facts` of rank 0 of the first world, which must have begun."""
        return self._read(0)["facts"]

    def keep(self, copy: Copy) -> None:
        """Keep a copy in place of the one before the last."""
        self.copies = [*self.copies[-1:], copy]

    def confirm(self) -> None:
        """Note that all ranks have gone beyond the newest copy: nothing that happened before it can be missing."""
        if self.copies:
            self.confirmed = self.copies[-1].step

    def copy_of(self, step: int | None) -> Copy | None:
        return next((copy for copy in self.copies if copy.step == step), None)

    def drop_copies(self) -> None:
        """Continue from the newest checkpoint, because the ranks that are left do not have the whole state."""
        self.copies, self.start_step, self.confirmed, self.copied_at = [], None, None, None

    def describe(self) -> str:
        """Return a line about why this world was formed, and from which step it continues."""
        where = "the newest checkpoint" if self.start_step is None else f"step {self.start_step}"
        seconds = time.monotonic() - self.left_at
        return f"{self.reason}: {quantity(len(self._members), 'rank')} continued after {where}, {seconds:.2f} s later"

    def is_awaited(self) -> bool:
        """Return True if a process waits to join. The store is read at most every JOIN_POLL_S."""
        if not self._is_awaited and time.monotonic() - self._checked_at >= JOIN_POLL_S:
            self._checked_at = time.monotonic()
            with suppress(RuntimeError):  # the store has exited, so that no process can join
                self._is_awaited = self._store.add("candidates", 0) > self._num_candidates
        return self._is_awaited

    @property
    def has_begun(self) -> bool:
        """Return True if the job can continue without one of its ranks."""
        return bool(self._members)

    def lost(self, anywhere: bool = False) -> list[RankProcess]:
        """Return the processes of this world that no longer run on this machine, or on any machine as far as known."""
        others = [m for m in self._members if anywhere or m.process.machine == self._own.machine]
        return [m.process for m in others if not _is_same(m.process, self._own) and self._is_gone(m)]

    def beat(self) -> None:
        """While this process is a rank, let the other processes know that it runs. Return if the store exits."""
        with suppress(RuntimeError):
            store = self._store.clone()  # another connection: calls of this one may wait for an answer
            while True:
                if self._members:
                    store.add("beats", 1)
                    store.add(_beats_key(self._own), 1)
                time.sleep(BEAT_S)

    def is_over(self) -> bool:
        """Return True if the next world exists, so that whatever happens in this one has no effect."""
        return self._store.check([f"members/{self.number + 1}"])

    def end(self) -> None:
        """Release the processes that wait to join: the job is over."""
        with suppress(RuntimeError):  # the store has exited
            self._store.set(ENDED, "")

    def form_next(self, rank_info: RankInfo, has_failed: Callable[[], str | None], stacks_dir: Path | None) -> RankInfo:
        """Form the next world with the other ranks that are left and the processes that wait. Return its info here.

        The lowest of the ranks that are left decides who they are. A rank that does not respond is killed if it is on
        this machine, and its stacks are written to `stacks_dir`. A rank on another machine that shows no sign of life
        for SILENT_S is lost: its machine may be lost as well, so that no agent reports it. If the others have formed
        the next world without this rank, join a later one. Raises JobFailed with the failure that `has_failed` returns,
        and what `join` raises.
        """
        number, self.left_at = self.number + 1, time.monotonic()
        kept, beats = tuple(copy.step for copy in self.copies), dict[str, tuple[int, float]]()
        self._store.set(f"here/{number}/{rank_info.rank}", _text(Member(self._own, self.confirmed, kept)))
        while not self._store.check([f"members/{number}"]):
            if failure := has_failed():
                raise JobFailed(failure, follows=True)
            keys = [f"here/{number}/{rank}" for rank in range(len(self._members))]
            found = [Member.parse(self._store.get(key)) for key in keys if self._store.check([key])]
            arrived = [member for member in found if not self._is_gone(member)]
            missing = [m for m in self._members if not any(_is_same(m.process, other.process) for other in arrived)]
            are_lost = [self._is_gone(member) or self._is_silent(member, beats) for member in missing]
            is_over = all(are_lost) or time.monotonic() - self.left_at > self._timeout_s
            if is_over and _is_same(arrived[0].process, self._own):
                reasons = [self._drop(member.process, stacks_dir) for member in missing]
                self._close(number, arrived, reasons)
            time.sleep(POLL_S)
        return self._enter(number, rank_info) or self.join(rank_info, number)

    def join(self, rank_info: RankInfo, number: int = 0) -> RankInfo:
        """Wait until a world after `number` has this process, enter it, and return its info.

        Raises JobEnded, JobFailed if all ranks of the job exit or none shows a sign of life, and Preempted after a
        signal.
        """
        self._members, beats, seen_at = [], -1, time.monotonic()
        key = f"candidate/{self._store.add('candidates', 1)}"
        self._store.set(key, _text(Member(self._own)))
        while not self._store.check([ENDED]):
            if reason := received():
                self._store.delete_key(key)
                raise Preempted(reason)
            if self._store.check([f"members/{number + 1}"]):
                number += 1
                if (info := self._enter(number, rank_info)) is not None:
                    self._store.delete_key(key)
                    return info
            elif all(self._is_gone(Member.parse(text)) for text in self._read(number)["members"]):
                raise JobFailed("all ranks of the world that this process waited for have exited")
            elif (now := self._store.add("beats", 0)) != beats:
                beats, seen_at = now, time.monotonic()
            elif time.monotonic() - seen_at > 2 * self._timeout_s:
                raise JobFailed("no rank of the world that this process waited for responds")
            time.sleep(POLL_S)
        raise JobEnded

    def _is_gone(self, member: Member) -> bool:
        """Return True if a process has exited or, on this machine, was stopped by a signal.

        The loss of another machine is unknown.
        """
        process = member.process
        if process.machine == self._own.machine:
            return state_of(process) != "running"
        return self._store.check([gone_key(process.host, process.pid)])

    def _is_silent(self, member: Member, beats: dict[str, tuple[int, float]]) -> bool:
        """Return True if a process of another machine has shown no sign of life for SILENT_S.

        beats: what the earlier calls have found: the number of its signs, and when the last one was noticed.
        """
        if member.process.machine == self._own.machine:
            return False
        key, now = _beats_key(member.process), time.monotonic()
        if (count := self._store.add(key, 0)) != beats.get(key, (-1, now))[0]:
            beats[key] = (count, now)
        return now - beats[key][1] > SILENT_S

    def _drop(self, process: RankProcess, stacks_dir: Path | None) -> str:
        """Return a line about a rank that is left out; kill it if it runs on this machine."""
        if process.machine != self._own.machine or state_of(process) == "exited":
            return f"lost rank {process.rank} on {process.host}"
        finding = examine(process, self._timeout_s, stacks_dir)
        send_signal(process, signal.SIGKILL)
        return finding.line

    def _close(self, number: int, arrived: list[Member], reasons: list[str]) -> None:
        """Propose the members of a world: those that have arrived, and those that wait. The first proposal counts."""
        count = self._store.add("candidates", 0)
        keys = [key for i in range(1, count + 1) if self._store.check([key := f"candidate/{i}"])]
        candidates = [Member.parse(self._store.get(key)) for key in keys]
        known = [member.process for member in (*arrived, *self._members)]
        joining = [
            member
            for member in candidates
            if not self._is_gone(member) and not any(_is_same(member.process, other) for other in known)
        ]
        for key, member in zip(keys, candidates, strict=True):
            if any(_is_same(member.process, other) for other in known):
                self._store.delete_key(key)  # it has joined; if it was lost right then, it must not join again
        held = {step for member in arrived for step in member.kept}
        confirmed = [step for member in arrived if (step := member.confirmed) is not None and step in held]
        in_all = set.intersection(*(set(member.kept) for member in arrived))
        if joining:
            reasons.append(f"{len(joining)} joined")
        proposal = {
            "members": [_text(member) for member in (*arrived, *joining)],
            # A copy that no rank has confirmed may lack what rank 0 was about to log, unless it is the first one.
            "step": max(confirmed or in_all, default=None),
            "candidates": count,
            "reason": ", ".join(reasons),
        }
        self._store.compare_set(f"members/{number}", "", json.dumps(proposal))

    def _read(self, number: int) -> dict[str, Any]:
        facts: dict[str, Any] = json.loads(self._store.get(f"members/{number}"))
        return facts

    def _enter(self, number: int, rank_info: RankInfo) -> RankInfo | None:
        """Return this process's info in a world; None if it is no member."""
        facts = self._read(number)
        members = [Member.parse(text) for text in facts["members"]]
        ranks = [rank for rank, member in enumerate(members) if _is_same(member.process, self._own)]
        if not ranks:
            return None
        here = [rank for rank, member in enumerate(members) if member.process.machine == self._own.machine]
        self._members = [replace(m, process=m.process.at(rank)) for rank, m in enumerate(members)]
        self._own = self._own.at(ranks[0])
        self.number, self._num_candidates, self._is_awaited = number, facts["candidates"], False
        self.start_step, self.reason = facts["step"], facts["reason"]
        self.copies = [copy for copy in self.copies if copy.step == self.start_step]
        self.copied_at = self.copies[0].at if self.copies else None
        self.confirmed = self.start_step
        return replace(
            rank_info,
            rank=ranks[0],
            world_size=len(members),
            local_rank=here.index(ranks[0]),
            local_world_size=len(here),
            restart=number,
            on_one_machine=len(here) == len(members),
        )


def gone_key(host: str, pid: int) -> str:
    """Return the key by which a machine's agent reports that a process was killed."""
    return f"gone/{host}/{pid}"


def _beats_key(process: RankProcess) -> str:
    return f"beats/{process.host}/{process.pid}"


def _text(member: Member) -> str:
    return json.dumps(asdict(member))


def _is_same(one: RankProcess, other: RankProcess) -> bool:
    return (one.machine, one.pid, one.started) == (other.machine, other.pid, other.started)
