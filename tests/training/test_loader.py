"""What a batch brings with it, and that a loader leaves what it was given as it was."""

import itertools

import pytest
import torch
from torch.utils.data import TensorDataset

from runner.training.loader import Loader
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


def test_the_sampler_stays_as_it_was() -> None:
    given = Sampler(NUM_SAMPLES, batch_size=5)
    loader = make(given, shuffle=False, drop_last=True)
    assert (given.shuffle, given.drop_last) == (True, False)
    assert (loader.sampler.shuffle, loader.sampler.drop_last) == (False, True)
    assert loader.sampler.steps_per_epoch == given.steps_per_epoch - 1
