"""The number of store operations of a rank until its first step, for several world sizes."""

import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from commands import free_port
from ranks import run_ranks
from worlds import configure

from runner.distributed import rendezvous
from runner.distributed.backend import as_backend
from runner.distributed.environment import RankInfo
from runner.distributed.world_store import STOPPED
from runner.jobs.job import run_job
from runner.training.trainer import Trainer

GROUP = "/group/"  # the keys of torch's own process groups


class CountingStore(dist.Store):
    """A store that records the operations of the main thread and their keys."""

    def __init__(self, store: dist.Store, operations: list[tuple[str, tuple[str, ...]]]) -> None:
        super().__init__()
        self.store, self.operations = store, operations

    def _count(self, operation: str, *keys: str) -> None:
        if threading.current_thread() is threading.main_thread():
            self.operations.append((operation, keys))

    def set(self, key: str, value: Any) -> None:
        self._count("set", key)
        self.store.set(key, value)

    def get(self, key: str) -> bytes:
        self._count("get", key)
        return self.store.get(key)

    def add(self, key: str, value: int) -> int:
        self._count("add", key)
        return self.store.add(key, value)

    def compare_set(self, key: str, expected_value: Any, desired_value: Any) -> bytes:
        self._count("compare_set", key)
        return self.store.compare_set(key, expected_value, desired_value)

    def check(self, keys: list[str]) -> bool:
        self._count("check", *keys)
        return self.store.check(keys)

    def wait(self, keys: list[str], timeout: timedelta = timedelta(seconds=60)) -> None:
        self._count("wait", *keys)
        self.store.wait(keys, timeout)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self._count("multi_get", *keys)
        return self.store.multi_get(keys)

    def has_extended_api(self) -> bool:
        return True

    def clone(self) -> dist.Store:
        return self.store.clone()  # for the checkpoints


def number_of(operations: list[tuple[str, tuple[str, ...]]]) -> int:
    """Return the number of operations; a repeated check counts as one.

    A rank looks for a stop only if it has to wait, which depends on the speed of the other ranks.
    """
    operations = [each for each in operations if not each[1][-1].endswith(STOPPED)]
    polls = {each for each in operations if each[0] == "check"}
    return len(polls) + sum(operation != "check" for operation, _ in operations)


def until_first_step(outputs: Path, world_size: int, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Return the number of the runner's operations and of the process group's, for each rank."""
    overrides = ("model=toy", "data=toy", "parallel=ddp", "max_steps=1", "logger=none", f"outputs={outputs}")
    config, request = configure(*overrides, "backend=gloo")
    connect, step, port = rendezvous._connect, Trainer.step, free_port()

    def act(rank: int, world_size: int) -> tuple[int, int]:
        operations: list[tuple[str, tuple[str, ...]]] = []
        found: list[tuple[int, int]] = []
        stores: list[dist.Store] = []  # a store in C++ does not keep the Python object of the store that it contains

        def first_step(*args: Any, **options: Any) -> Any:
            of_group = [each for each in operations if GROUP in each[1][0]]
            found.append((number_of([each for each in operations if GROUP not in each[1][0]]), number_of(of_group)))
            return step(*args, **options)

        def counting(*args: Any) -> dist.Store:
            store = connect(*args)
            assert store is not None
            stores.append(CountingStore(store, operations))
            return stores[0]

        monkeypatch.setattr(Trainer, "step", first_step)
        monkeypatch.setattr(rendezvous, "_connect", counting)
        # Everything that ranks may have to agree on: machines, network interfaces and cores.
        unknown = {"inferred": ("local_rank", "local_world_size"), "on_one_machine": False}
        where: dict[str, Any] = {"master_addr": "127.0.0.1", "master_port": port, "hosts_store": rank == 0}
        rank_info = RankInfo(rank, rank, world_size, 1, source="test", **where, **unknown)
        world = rendezvous.join(rank_info, as_backend(config.backend))
        run_job(request, world)
        world.shutdown.close()
        return found[0]

    return run_ranks(act, world_size, forms_group=False)


@pytest.mark.thorough
def test_store_operations_do_not_grow_with_the_world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)  # otherwise the ranks do not exchange their cores
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0})
    counts = {n: until_first_step(tmp_path / str(n), n, monkeypatch) for n in (2, 4, 8)}
    for of_ranks in counts.values():
        assert of_ranks == [counts[2][0]] + [counts[2][1]] * (len(of_ranks) - 1), counts
    assert all(min(of_rank) > 0 for of_rank in counts[2]), counts  # both kinds of operations were counted
