"""Which samples a rank reads."""

import itertools

import pytest
from torch import tensor

from runner.training.sampler import Sampler, cut, generator, mix

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


def test_drop_last_leaves_the_uneven_batch_out() -> None:
    assert [Sampler(10, 4, drop_last=drop).steps_per_epoch for drop in (False, True)] == [3, 2]
    assert [Sampler(8, 4, drop_last=drop).steps_per_epoch for drop in (False, True)] == [2, 2]


def test_step_size_counts_the_samples_of_all_ranks() -> None:
    sampler = Sampler(10, 4, data_rank=1, data_ranks=2)
    assert [sampler.step_size(step) for step in range(3)] == [4, 4, 2]


def test_server_reads_nothing_but_makes_every_step() -> None:
    assert steps(Sampler(10, 4, micro_batches=2, data_rank=None, data_ranks=2), 0) == [[[], []]] * 3


def test_cut_is_contiguous_and_even() -> None:
    assert [cut(tensor([0, 1, 2, 3, 4]), part, 3).tolist() for part in range(3)] == [[0], [1, 2], [3, 4]]


def test_streams_of_near_keys_differ() -> None:
    seeds = {mix(seed, step, rank) for seed in range(10) for step in range(100) for rank in range(4)}
    assert len(seeds) == 4000
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert generator(1, 2).initial_seed() == mix(1, 2)
