"""The membership of ranks on several machines: what a process knows of those on other machines."""

import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch.distributed as dist

from runner.distributed import membership
from runner.distributed.environment import RankInfo
from runner.distributed.failures.heartbeat import RankProcess
from runner.distributed.membership import KEYS, Copy, Membership, gone_key
from runner.errors import JobFailed
from runner.process.identity import process_start


def process(rank: int) -> RankProcess:
    """Return a process of a machine of its own: this process for rank 0."""
    pid = os.getpid()
    return RankProcess(rank, f"host{rank}", f"machine {rank}", pid + rank, process_start(pid) or 0, -1)


@contextmanager
def beating(rank: Membership) -> Iterator[None]:
    threading.Thread(target=rank.beat, daemon=True).start()
    yield
    rank._members = []


def info(rank: int) -> RankInfo:
    return RankInfo(rank, 0, 2, 1, source="test")


def test_a_rank_that_its_agent_reports_as_killed_is_not_waited_for() -> None:
    store = dist.HashStore()
    first = Membership(store, process(0), timeout_s=300)
    first.begin([process(0), process(1)])
    first.keep(Copy(7, None))
    first.confirm()
    assert first.lost(anywhere=True) == []
    dist.PrefixStore(KEYS, store).set(gone_key("host1", process(1).pid), "")
    assert first.lost() == [], "other machines are not checked during each wait"
    assert first.lost(anywhere=True) == [process(1)]
    assert first.form_next(info(0), lambda: None, None).world_size == 1
    assert (first.start_step, first.reason) == (7, "lost rank 1 on host1")


def test_a_rank_of_another_machine_is_not_waited_for_once_it_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """The timeout is longer than the test may last."""
    monkeypatch.setattr(membership, "SILENT_S", 2.0)
    store = dist.HashStore()
    first, second = (Membership(store, process(rank), timeout_s=3000) for rank in (0, 1))
    for each in (first, second):
        each.begin([process(0), process(1)])
    sizes: list[int] = []
    forming = threading.Thread(target=lambda: sizes.append(first.form_next(info(0), lambda: None, None).world_size))
    with beating(second):
        forming.start()
        forming.join(4)
        assert forming.is_alive(), "a rank that still computes is waited for"
    forming.join(60)
    assert sizes == [1]


def test_a_process_that_was_lost_before_it_joined_does_not_join_again() -> None:
    """Its machine was lost with it, so that no agent has reported that it was killed."""
    store = dist.HashStore()
    first = Membership(store, process(0), timeout_s=0.1)
    first.begin([process(0)])
    keys = dist.PrefixStore(KEYS, store)
    keys.add("candidates", 1)
    keys.set("candidate/1", json.dumps({"process": process(1), "confirmed": None, "kept": ()}))
    sizes = []
    for _ in range(3):
        sizes.append(first.form_next(info(0), lambda: None, None).world_size)
    assert sizes == [2, 1, 1]


@pytest.mark.fault("the loss of all ranks of an elastic run while another one waits to join", outcome="refused")
def test_a_process_waits_to_join_only_while_ranks_respond() -> None:
    store = dist.HashStore()
    first, late = (Membership(store, process(rank), timeout_s=1) for rank in (0, 1))
    first.begin([process(0)])
    failures: list[str] = []

    def join() -> None:
        try:
            late.join(info(1))
        except JobFailed as error:
            failures.append(str(error))

    waiting = threading.Thread(target=join)
    with beating(first):
        waiting.start()
        waiting.join(4)
        assert waiting.is_alive()
    waiting.join(60)
    assert failures == ["no rank of the world that this process waited for responds"]
