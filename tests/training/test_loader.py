"""What a batch brings with it, and that a loader leaves what it was given as it was."""

import itertools
import multiprocessing
import os
import signal
import time

import pytest
import torch
from torch.utils.data import TensorDataset

from runner.training.loader import Loader
from runner.training.loader_workers import WorkerDied, death_behind
from runner.training.precision import Precision
from runner.training.sampler import Sampler

NUM_SAMPLES = 22
CPU = torch.device("cpu")


def make(sampler: Sampler, **options: object) -> Loader:
    numbers = torch.arange(NUM_SAMPLES)
    return Loader(TensorDataset(numbers[:, None].float(), numbers), sampler, Precision("fp32", CPU), CPU, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize(("rank", "num_ranks"), [(0, 1), (2, 3), (None, 3)])
def test_a_batch_carries_the_indices_of_its_samples(num_workers: int, rank: int | None, num_ranks: int) -> None:
    sampler = Sampler(NUM_SAMPLES, batch_size=5, micro_batches=2, data_rank=rank, data_ranks=num_ranks)
    loader = make(sampler, num_workers=num_workers)
    try:
        list(itertools.islice(loader.steps(epoch=0), 2))  # an epoch that is left, with batches that workers have read
        for epoch, first_step in ((0, 0), (1, 3)):
            batches = [m for step in loader.steps(epoch, first_step) for m in step.micro_batches]
            assert [list(batch.indices) for batch in batches] == list(sampler.shares(epoch, first_step))
            for batch in batches:
                counted = list(batch.indices) or [0]  # an empty share is of one sample that counts nothing
                assert (batch.targets.tolist(), batch.num_samples) == (counted, len(batch.indices))
    finally:
        loader.close()


class Rows(TensorDataset):
    """Counts how often it is asked for rows."""

    reads_ahead = True
    reads = 0

    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        self.reads += 1
        return [tensor[indices] for tensor in self.tensors]


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize(("rank", "num_ranks", "micro_batches"), [(0, 1, 1), (1, 3, 2), (2, 3, 2), (None, 3, 1)])
def test_what_is_read_ahead_is_what_is_read_share_by_share(
    rank: int | None, num_ranks: int, micro_batches: int, num_workers: int
) -> None:
    sampler = Sampler(NUM_SAMPLES, 5, micro_batches, rank, num_ranks)
    rows = Rows(torch.rand(NUM_SAMPLES, 3, dtype=torch.float64), torch.arange(NUM_SAMPLES))
    once = Rows(*rows.tensors)
    once.reads_ahead = False
    ahead, one_by_one = (
        Loader(dataset, sampler, Precision("fp32", CPU), CPU, num_workers=num_workers) for dataset in (rows, once)
    )
    try:
        for epoch, first_step in ((0, 0), (1, 3), (2, 0)):
            found, expected = (
                [(batch, step.num_samples) for step in loader.steps(epoch, first_step) for batch in step.micro_batches]
                for loader in (ahead, one_by_one)
            )
            assert [(list(batch.indices), size) for batch, size in found] == [
                (list(batch.indices), size) for batch, size in expected
            ]
            for (batch, _), (other, _) in zip(found, expected, strict=True):
                assert torch.equal(batch.inputs, other.inputs) and torch.equal(batch.targets, other.targets)
                # As a resumed run has it: where a tensor begins decides over the last bit of a matrix product.
                assert batch.inputs.data_ptr() % 64 == batch.targets.data_ptr() % 64 == 0
    finally:
        ahead.close()
        one_by_one.close()
    if num_workers == 0 and rank in (0, 2):  # the others have many shares without a sample, which are read alone
        assert 0 < rows.reads < once.reads


def test_no_more_is_read_ahead_than_its_bytes_allow(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = Rows(torch.zeros(NUM_SAMPLES, 64), torch.arange(NUM_SAMPLES))
    monkeypatch.setattr("runner.training.loader.BYTES_AT_ONCE", 3 * 2 * (64 * 4 + 8))  # 3 shares of 2 samples
    loader = Loader(rows, Sampler(NUM_SAMPLES, batch_size=2), Precision("fp32", CPU), CPU)
    assert len(list(loader.steps(epoch=0))) == 11
    assert rows.reads == 1 + 4  # the first share by itself: how large it is, is not known before
    assert len(list(loader.steps(epoch=1))) == 11
    assert rows.reads == 5 + 4


@pytest.mark.parametrize("first_step", [0, 7])
def test_a_small_first_share_says_no_more_than_a_whole_one(first_step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run may go on at the end of an epoch, where the last step has one sample of three."""
    rows = Rows(torch.zeros(NUM_SAMPLES, 64), torch.arange(NUM_SAMPLES))
    monkeypatch.setattr("runner.training.loader.BYTES_AT_ONCE", 2 * 3 * (64 * 4 + 8))  # 2 shares of 3 samples
    loader = Loader(rows, Sampler(NUM_SAMPLES, batch_size=3), Precision("fp32", CPU), CPU)
    assert len(list(loader.steps(0, first_step))) == 8 - first_step
    loader.read_by(loader.sampler)
    before = rows.reads
    assert len(list(loader.steps(1, 7))) == 1 and len(list(loader.steps(2))) == 8
    assert rows.reads == before + 1 + 4


def test_the_sampler_stays_as_it_was() -> None:
    given = Sampler(NUM_SAMPLES, batch_size=5)
    loader = make(given, shuffle=False, drop_last=True)
    assert (given.shuffle, given.drop_last) == (True, False)
    assert (loader.sampler.shuffle, loader.sampler.drop_last) == (False, True)
    assert loader.sampler.steps_per_epoch == given.steps_per_epoch - 1


class Full(torch.utils.data.Dataset[torch.Tensor]):
    """Samples of 1 MiB, in a worker that finds no room for a batch of them."""

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
def test_a_worker_without_shared_memory_says_what_it_needs() -> None:
    sampler = Sampler(NUM_SAMPLES, batch_size=5)
    loader = Loader(Full(), sampler, Precision("fp32", CPU), CPU, num_workers=1)
    try:
        with pytest.raises(OSError, match=r"5\.0 MiB of shared memory .*/dev/shm has .* MiB free of .*num_workers=0"):
            next(loader.steps(epoch=0))
    finally:
        loader.close()


@pytest.mark.fault("kill -9 of a loader worker", outcome="refused")
def test_a_worker_that_was_killed_is_named() -> None:
    loader = make(Sampler(NUM_SAMPLES, batch_size=1), num_workers=2)
    try:
        steps = loader.steps(epoch=0)
        next(steps)
        worker = loader._loader._iterator._workers[1]  # type: ignore[union-attr]
        os.kill(worker.pid, signal.SIGKILL)
        with pytest.raises(WorkerDied, match=rf"^loader worker 1 \(process {worker.pid}\) died: SIGKILL; .*memory"):
            list(steps)
    finally:
        loader.close()


def _die_later() -> None:
    time.sleep(0.3)
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_worker_whose_connection_ends_before_it_is_gone_is_named() -> None:
    worker = multiprocessing.get_context("fork").Process(target=_die_later)
    worker.start()
    try:
        died = death_behind(ConnectionResetError("reset by peer"), [worker])
        assert died is not None and str(died).startswith(f"loader worker 0 (process {worker.pid}) died: SIGKILL")
        assert death_behind(ConnectionResetError("of the data set itself"), ()) is None  # at once: none to wait for
    finally:
        worker.join()
