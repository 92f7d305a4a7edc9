"""Which samples a rank reads."""

import itertools
import tracemalloc

import pytest
import torch

from runner.runs.train_state import OLDER_ORDER, ORDER
from runner.training.keyed_order import Permutation, Positions
from runner.training.sampler import AT_ONCE, Sampler, cut, generator, mix

SIZES = [(100, 16, 1), (100, 16, 3), (7, 3, 2), (33, 16, 2), (5, 8, 4), (1, 1, 1)]


def steps(sampler: Sampler, epoch: int, first_step: int = 0) -> list[list[list[int]]]:
    """Step by step, the micro-batches of one rank."""
    shares = sampler.shares(epoch, first_step)
    made = [
        list(itertools.islice(shares, sampler.num_micro_batches(step)))
        for step in range(first_step, sampler.steps_per_epoch)
    ]
    assert next(shares, None) is None
    return made


@pytest.mark.parametrize("data_ranks", [1, 2, 3, 4, 7])
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
            assert expected, "a micro-batch without a sample"
    assert sorted(i for step in one for micro in step for i in micro) == list(range(num_samples))


def test_order_is_new_each_epoch_and_for_each_seed() -> None:
    orders = {
        tuple(i for share in Sampler(100, 10, seed=seed).shares(epoch) for i in share)
        for seed, epoch in itertools.product(range(3), range(3))
    }
    assert len(orders) == 9
    # The next epoch of a seed is not an epoch of the next seed.
    assert mix(0, 1) != mix(1, 0)


def test_order_without_shuffle_is_the_data_sets_own() -> None:
    sampler = Sampler(10, 4, shuffle=False)
    assert [list(share) for share in sampler.shares(5)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def test_position_in_an_epoch_is_where_an_uninterrupted_one_would_be() -> None:
    sampler = Sampler(100, 16, micro_batches=3, data_rank=1, data_ranks=2, seed=1)
    assert steps(sampler, 4, first_step=3) == steps(sampler, 4)[3:]


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("batch_size", [30_000, 90])
def test_of_ten_billion_samples_a_share_costs_no_more_than_its_size(
    batch_size: int, shuffle: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From whichever step on, and of the rank's own samples alone."""
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
        share = [index for part in itertools.islice(sampler.shares(4, first_step), 2) for index in part]
        assert len(share) <= batch_size // num_ranks + 1
        seen.update(share)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    sizes = [ranks[0].step_size(step) for step in starts]
    assert len(seen) == sum(sizes) and min(seen) >= 0 and max(seen) < num_samples
    assert (max(seen) == num_samples - 1) or shuffle
    assert peak < 24 * 2**20
    most = max(AT_ONCE, batch_size // num_ranks)
    assert (0 < computed <= len(ranks) * len(starts) * most) if shuffle else computed == 0


def test_shares_are_the_same_however_many_are_computed_together(monkeypatch: pytest.MonkeyPatch) -> None:
    samplers = [Sampler(5000, 64, 3, 1, 2, weights=weights) for weights in (None, torch.arange(5000.0).double())]
    together = [[*sampler.shares(2, 1)] for sampler in samplers]
    monkeypatch.setattr("runner.training.sampler.AT_ONCE", 1)
    assert [[*sampler.shares(2, 1)] for sampler in samplers] == together


@pytest.mark.parametrize(
    ("order", "shuffled", "drawn"),
    [
        (
            OLDER_ORDER,
            [16, 2, 0, 1, 7, 3, 22, 17, 20, 9, 21, 14, 5, 6, 19, 12, 8, 11, 10, 4, 15, 18, 13],
            [15, 21, 22, 20, 21, 17, 15, 2, 20, 17, 12, 4, 19, 4, 21, 12, 16, 11, 9, 10, 20, 22, 15],
        ),
        (
            ORDER,
            [6, 13, 10, 3, 9, 0, 21, 2, 19, 22, 11, 4, 18, 7, 16, 17, 15, 5, 12, 14, 20, 1, 8],
            [17, 12, 14, 20, 11, 20, 14, 10, 13, 13, 18, 12, 18, 11, 16, 16, 11, 22, 13, 18, 15, 7, 8],
        ),
    ],
)
def test_an_order_that_runs_were_begun_with_stays(order: int, shuffled: list[int], drawn: list[int]) -> None:
    """The older one is as the version gave it that had no other."""
    for expected, weights in ((shuffled, None), (drawn, torch.arange(23, dtype=torch.float64))):
        sampler = Sampler(23, 5, seed=4, weights=weights, order=order)
        assert [index for share in sampler.shares(2) for index in share] == expected
        assert [index for share in sampler.shares(2, 3) for index in share] == expected[15:]


def test_drop_last_leaves_the_uneven_batch_out() -> None:
    assert [Sampler(10, 4, drop_last=drop).steps_per_epoch for drop in (False, True)] == [3, 2]
    assert [Sampler(8, 4, drop_last=drop).steps_per_epoch for drop in (False, True)] == [2, 2]


def test_step_size_counts_the_samples_of_all_ranks() -> None:
    sampler = Sampler(10, 4, data_rank=1, data_ranks=2)
    assert [sampler.step_size(step) for step in range(3)] == [4, 4, 2]


def test_server_reads_nothing_but_makes_every_step() -> None:
    assert steps(Sampler(10, 4, micro_batches=2, data_rank=None, data_ranks=2), 0) == [[[], []]] * 3


def test_cut_is_contiguous_and_even() -> None:
    assert [[*cut(range(10, 15), part, 3)] for part in range(3)] == [[10], [11, 12], [13, 14]]


def test_streams_of_near_keys_differ() -> None:
    seeds = {mix(seed, step, rank) for seed in range(10) for step in range(100) for rank in range(4)}
    assert len(seeds) == 4000
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert generator(1, 2).initial_seed() == mix(1, 2)
