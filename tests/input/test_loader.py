"""Batches of a loader, reading ahead, and failures of workers."""

import errno
import itertools
import multiprocessing
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from leftovers import own_shared_memory
from ranks import run_ranks
from torch.utils.data import Dataset, TensorDataset
from worlds import configure

from runner.distributed.environment import RankInfo
from runner.errors import InputError, JobFailed
from runner.input.loader import Loader
from runner.input.sampler import Sampler
from runner.launchers.spawn import Spawn

NUM_SAMPLES = 22
CPU = torch.device("cpu")


def make(sampler: Sampler, **options: object) -> Loader:
    numbers = torch.arange(NUM_SAMPLES)
    return Loader(TensorDataset(numbers[:, None].float(), numbers), sampler, torch.float32, CPU, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize(("rank", "num_ranks"), [(0, 1), (2, 3), (None, 3)])
def test_batches_contain_the_indices_of_their_samples(num_workers: int, rank: int | None, num_ranks: int) -> None:
    sampler = Sampler(NUM_SAMPLES, batch_size=5, micro_batches=2, data_rank=rank, data_ranks=num_ranks)
    loader = make(sampler, num_workers=num_workers)
    try:
        list(itertools.islice(loader.steps(epoch=0), 2))  # an abandoned epoch, of which workers have read batches
        for epoch, first_step in ((0, 0), (1, 3)):
            batches = [m for step in loader.steps(epoch, first_step) for m in step.micro_batches]
            assert [list(batch.indices) for batch in batches] == list(sampler.local_batches(epoch, first_step))
            for batch in batches:
                counted = list(batch.indices) or [0]  # one sample that is not counted
                assert (batch.targets.tolist(), batch.num_samples) == (counted, len(batch.indices))
    finally:
        loader.close()


class Rows(TensorDataset):
    """Counts its reads."""

    reads_ahead = True
    reads = 0

    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        self.reads += 1
        return [tensor[indices] for tensor in self.tensors]


@pytest.mark.parametrize(("rank", "num_ranks", "micro_batches"), [(0, 1, 1), (2, 3, 2), (None, 3, 1)])
def test_reading_ahead_returns_the_same_batches(rank: int | None, num_ranks: int, micro_batches: int) -> None:
    sampler = Sampler(NUM_SAMPLES, 5, micro_batches, rank, num_ranks)
    rows = Rows(torch.rand(NUM_SAMPLES, 3, dtype=torch.float64), torch.arange(NUM_SAMPLES))
    once = Rows(*rows.tensors)
    once.reads_ahead = False
    ahead, one_by_one = (Loader(dataset, sampler, torch.float32, CPU) for dataset in (rows, once))
    for epoch, first_step in ((0, 0), (1, 3), (2, 0)):
        found, expected = (
            [(batch, step.num_samples) for step in loader.steps(epoch, first_step) for batch in step.micro_batches]
            for loader in (ahead, one_by_one)
        )
        for (batch, size), (other, other_size) in zip(found, expected, strict=True):
            assert (list(batch.indices), size) == (list(other.indices), other_size)
            assert torch.equal(batch.inputs, other.inputs) and torch.equal(batch.targets, other.targets)
            # As in a resumed run: the last bit of a matrix product depends on the alignment.
            assert batch.inputs.data_ptr() % 64 == batch.targets.data_ptr() % 64 == 0
    if rank is not None:  # the other has empty local micro-batches, which are read separately
        assert 0 < rows.reads < once.reads


@pytest.mark.parametrize("first_step", [0, 7])
def test_reading_ahead_is_limited_in_bytes(first_step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run may resume at the end of an epoch, where the last step has one sample instead of three."""
    rows = Rows(torch.zeros(NUM_SAMPLES, 64), torch.arange(NUM_SAMPLES))
    monkeypatch.setattr("runner.input.loader.BYTES_AT_ONCE", 2 * 3 * (64 * 4 + 8))  # 2 local micro-batches of 3 samples
    loader = Loader(rows, Sampler(NUM_SAMPLES, batch_size=3), torch.float32, CPU)
    assert len(list(loader.steps(0, first_step))) == 8 - first_step
    loader.use_sampler(loader.sampler)
    before = rows.reads
    assert len(list(loader.steps(1, 7))) == 1 and len(list(loader.steps(2))) == 8
    assert rows.reads == before + 1 + 4


class Full(torch.utils.data.Dataset[torch.Tensor]):
    """Samples of 1 MiB, in a worker without shared memory for a batch."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        def refuse(*size: int) -> None:
            raise RuntimeError(
                "unable to allocate shared memory(shm) for file </torch_1_2>: No space left on device (28)"
            )

        torch.UntypedStorage._new_using_fd_cpu = refuse  # type: ignore[method-assign, assignment]
        return torch.zeros(2**18)


@pytest.mark.fault("no shared memory for a loader worker", outcome="refused")
def test_a_worker_without_shared_memory_reports_that() -> None:
    loader = Loader(Full(), Sampler(NUM_SAMPLES, batch_size=5), torch.float32, CPU, num_workers=1)
    try:
        with pytest.raises(
            JobFailed, match=r"^loader.num_workers: /dev/shm has no space .*--shm-size=1g, or use fewer$"
        ):
            next(loader.steps(epoch=0))
    finally:
        loader.close()


@pytest.mark.fault("/dev/shm of 4 KiB, or read-only", outcome="refused")
@pytest.mark.parametrize(("options", "flags"), [("size=4k", 0), ("", 1)], ids=["small", "read-only"])
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount /dev/shm")
def test_loader_workers_and_launchers_without_shared_memory_are_refused(options: str, flags: int) -> None:
    def refuse(rank: int, world_size: int) -> None:
        own_shared_memory(options, flags)
        with pytest.raises(
            InputError, match=r"^loader.num_workers=2 needs shared memory, but /dev/shm .*--shm-size=1g$"
        ):
            make(Sampler(NUM_SAMPLES, batch_size=1), num_workers=2)
        with pytest.raises(InputError, match=r"^launcher=spawn needs shared memory, but /dev/shm .*--shm-size=1g$"):
            Spawn().launch(configure("launcher=spawn")[1], RankInfo())

    run_ranks(refuse, 1, forms_group=False)


@pytest.mark.fault("kill -9 of a loader worker", outcome="refused")
def test_a_killed_worker_is_named() -> None:
    loader = make(Sampler(NUM_SAMPLES, batch_size=1), num_workers=2)
    try:
        steps = loader.steps(epoch=0)
        next(steps)
        worker, _ = multiprocessing.active_children()
        with pytest.raises(RuntimeError, match=rf"DataLoader worker \(pid(\(s\))? {worker.pid}\) (is killed|exited)"):
            os.kill(worker.pid, signal.SIGKILL)
            worker.join(60)
            list(steps)
    finally:
        loader.close()


class Odd(Dataset[torch.Tensor]):
    """Each worker first sends a batch and then fails, while the tensors of that batch may still be in transit."""

    def __init__(self, fail: Callable[[], object]):
        self.fail = fail

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        if index > 3:
            self.fail()
        return torch.zeros(3)


def interrupt() -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("fail", "message"),
    [
        (sys.exit, r"(?s)in DataLoader worker process \d.*RuntimeError: the dataset raised SystemExit\(\)"),
        (interrupt, r"(?s)in DataLoader worker process \d.*RuntimeError: the dataset raised KeyboardInterrupt\(\)"),
        (partial(os._exit, 0), r"DataLoader worker \(pid \d+\) exited unexpectedly with status 0"),
        (partial(time.sleep, 600), "DataLoader workers returned no batch within loader.timeout_s=2.0 s"),
    ],
    ids=["exit", "interrupt", "_exit", "hang"],
)
@pytest.mark.fault("a loader worker that exits, is interrupted or hangs", outcome="refused")
def test_a_failed_worker_and_the_reason_are_named(fail: Callable[[], object], message: str) -> None:
    options = {"num_workers": 2, "shuffle": False, "timeout_s": 2.0 if isinstance(fail, partial) else None}
    loader = Loader(Odd(fail), Sampler(NUM_SAMPLES, batch_size=1), torch.float32, CPU, **options)  # type: ignore[arg-type]
    try:
        with pytest.raises(RuntimeError, match=message):
            list(loader.steps(epoch=0))
    finally:
        loader.close()


class WithoutFiles(Dataset[torch.Tensor]):
    """A dataset that leaves its process one more open file."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        opened = {int(name) for name in os.listdir("/proc/self/fd")}  # one of them lists the directory
        lowest = min(set(range(len(opened) + 1)) - opened)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        return torch.zeros(3)


@pytest.mark.fault("a low limit of open files", outcome="refused")
def test_a_worker_that_cannot_send_a_batch_is_reported() -> None:
    """Its sending thread would print a traceback and lose the batch, for which the loader would wait forever."""
    options = {"num_workers": 1, "timeout_s": 60.0}
    loader = Loader(WithoutFiles(), Sampler(NUM_SAMPLES, batch_size=1), torch.float32, CPU, **options)  # type: ignore[arg-type]
    try:
        with pytest.raises(JobFailed, match="a batch cannot be received, because the limit of open files is"):
            list(loader.steps(epoch=0))
    finally:
        loader.close()


def test_lost_connection_to_an_exited_worker_names_the_worker() -> None:
    loader = make(Sampler(NUM_SAMPLES, batch_size=1), num_workers=1)
    try:
        next(loader.steps(epoch=0))
        (worker,) = multiprocessing.active_children()

        class Raising:
            _workers = (worker,)

            def __init__(self, error: Exception):
                self._error = error

            def __iter__(self) -> Iterator[None]:
                raise self._error
                yield

        class Batches:
            """As the iterator of DataLoader, if the worker exits while a tensor is received from it."""

            _workers = (worker,)

            def __iter__(self) -> Iterator[None]:
                os.kill(worker.pid, signal.SIGKILL)
                raise FileNotFoundError
                yield

        limit = "loader.num_workers: a batch cannot be received, because the limit of open files is .*; raise it"
        of_torch = RuntimeError("Too many open files. Communication with the workers is no longer possible.")
        of_python = RuntimeError("received 0 items of ancdata")
        # while the worker lives
        for error in (EOFError(), OSError(errno.EMFILE, "Too many open files"), of_torch, of_python):
            with pytest.raises(JobFailed, match=limit):
                list(loader._naming_workers(Raising(error)))  # type: ignore[arg-type]
        with pytest.raises(RuntimeError, match=rf"DataLoader worker \(pid {worker.pid}\) is killed by signal"):
            list(loader._naming_workers(Batches()))  # type: ignore[arg-type]
    finally:
        loader.close()
