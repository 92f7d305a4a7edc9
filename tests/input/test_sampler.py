"""The samples that a rank reads."""

import itertools
import tracemalloc

import numpy as np
import pytest
import torch

from runner.input.rng import derive_seed
from runner.input.sampler import AT_ONCE, Permutation, Positions, Sampler

SIZES = [(100, 16, 1), (100, 16, 3), (7, 3, 2), (33, 16, 2), (5, 8, 4), (1, 1, 1)]


def steps(sampler: Sampler, epoch: int, first_step: int = 0) -> list[list[list[int]]]:
    """Return the local micro-batches of one rank by step."""
    batches = sampler.local_batches(epoch, first_step)
    made = [
        list(itertools.islice(batches, sampler.num_micro_batches(step)))
        for step in range(first_step, sampler.steps_per_epoch)
    ]
    assert next(batches, None) is None
    return made


@pytest.mark.parametrize("data_ranks", [2, 3, 7])
@pytest.mark.parametrize(("num_samples", "batch_size", "micro_batches"), SIZES)
def test_batches_do_not_depend_on_the_number_of_ranks(
    num_samples: int, batch_size: int, micro_batches: int, data_ranks: int
) -> None:
    one = steps(Sampler(num_samples, batch_size, micro_batches, seed=3), epoch=2)
    ranks = [
        steps(Sampler(num_samples, batch_size, micro_batches, rank, data_ranks, seed=3), epoch=2)
        for rank in range(data_ranks)
    ]
    for step, micro in enumerate(one):
        for number, expected in enumerate(micro):
            assert [i for rank in ranks for i in rank[step][number]] == expected
            lengths = [len(rank[step][number]) for rank in ranks]
            assert max(lengths) - min(lengths) <= 1
            assert expected, "an empty micro-batch"
    assert sorted(i for step in one for micro in step for i in micro) == list(range(num_samples))


def test_the_order_depends_on_seed_and_epoch() -> None:
    orders = {
        tuple(i for batch in Sampler(100, 10, seed=seed).local_batches(epoch) for i in batch)
        for seed, epoch in itertools.product(range(3), range(3))
    }
    assert len(orders) == 9
    # The next epoch of a seed is not an epoch of the next seed.
    assert derive_seed(0, 1) != derive_seed(1, 0)


def test_the_order_without_shuffle_is_the_datasets() -> None:
    sampler = Sampler(10, 4, shuffle=False)
    assert [list(batch) for batch in sampler.local_batches(5)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("batch_size", [30_000, 90])
def test_ten_billion_samples_cost_no_more_than_those_that_are_read(
    batch_size: int, shuffle: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At any step, and only for the rank's samples."""
    computed = 0

    def counting(order: Permutation, positions: Positions) -> Positions:
        nonlocal computed
        computed += len(positions)
        return at(order, positions)

    at = Permutation.__call__
    monkeypatch.setattr(Permutation, "__call__", counting)
    num_samples, num_ranks, seen = 10**10 + 7, 3, set()
    ranks = [Sampler(num_samples, batch_size, 2, rank, num_ranks, shuffle=shuffle) for rank in range(num_ranks)]
    starts = [0, ranks[0].steps_per_epoch // 2, ranks[0].steps_per_epoch - 1]
    tracemalloc.start()
    for sampler, first_step in itertools.product(ranks, starts):
        read = [index for part in itertools.islice(sampler.local_batches(4, first_step), 2) for index in part]
        assert len(read) <= batch_size // num_ranks + 1
        seen.update(read)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    sizes = [ranks[0].step_size(step) for step in starts]
    assert len(seen) == sum(sizes) and min(seen) >= 0 and max(seen) < num_samples
    assert (max(seen) == num_samples - 1) or shuffle
    assert peak < 24 * 2**20
    most = max(AT_ONCE, batch_size // num_ranks)
    assert (0 < computed <= len(ranks) * len(starts) * most) if shuffle else computed == 0


def test_indices_do_not_depend_on_how_many_are_computed_together(monkeypatch: pytest.MonkeyPatch) -> None:
    samplers = [Sampler(5000, 64, 3, 1, 2, weights=weights) for weights in (None, torch.arange(5000.0).double())]
    together = [[*sampler.local_batches(2, 1)] for sampler in samplers]
    monkeypatch.setattr("runner.input.sampler.AT_ONCE", 1)
    assert [[*sampler.local_batches(2, 1)] for sampler in samplers] == together


def test_the_order_of_samples_is_stable() -> None:
    """Another permutation would change the results of every run."""
    shuffled = [6, 13, 10, 3, 9, 0, 21, 2, 19, 22, 11, 4, 18, 7, 16, 17, 15, 5, 12, 14, 20, 1, 8]
    drawn = [17, 12, 14, 20, 11, 20, 14, 10, 13, 13, 18, 12, 18, 11, 16, 16, 11, 22, 13, 18, 15, 7, 8]
    for expected, weights in ((shuffled, None), (drawn, torch.arange(23, dtype=torch.float64))):
        sampler = Sampler(23, 5, seed=4, weights=weights)
        assert [index for batch in sampler.local_batches(2) for index in batch] == expected
        assert [index for batch in sampler.local_batches(2, 3) for index in batch] == expected[15:]
    large = Permutation(10**6, 1)(np.arange(0, 10**6, 250_000, dtype=np.uint64))
    assert large.tolist() == [27181, 919394, 444116, 732718]


def test_drop_last_skips_the_incomplete_step() -> None:
    assert [Sampler(10, 4, drop_last=drop).steps_per_epoch for drop in (False, True)] == [3, 2]
    assert [Sampler(8, 4, drop_last=drop).steps_per_epoch for drop in (False, True)] == [2, 2]


def test_a_parameter_server_reads_nothing_in_every_step() -> None:
    assert steps(Sampler(10, 4, micro_batches=2, data_rank=None, data_ranks=2), 0) == [[[], []]] * 3
