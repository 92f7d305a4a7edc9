"""Permutations by key: each number occurs once, and orders are as random as those of torch.randperm."""

import itertools
import math

import numpy as np
import numpy.typing as npt
import pytest

from runner.input.rng import derive_seed
from runner.input.sampler import Permutation, WeightedDraws, splitmix64

Orders = npt.NDArray[np.int64]  # (num_orders, size)


def by_key(size: int, num_orders: int, num_rounds: int | None = None, swaps: bool = True) -> Orders:
    """Return the orders of many keys at once; with fewer rounds or without the swap, to show that both are needed."""
    order, keys = Permutation(size, 0), splitmix64(size, np.arange(num_orders, dtype=np.uint64))
    swap, *rounds = splitmix64(keys[:, None, None], np.arange(1 + len(order._keys), dtype=np.uint64)).T[:, 0, :, None]
    order._keys = rounds[:num_rounds]
    found = order._mix(np.tile(np.arange(size, dtype=np.uint64), (num_orders, 1)))
    while (outside := found >= size).any():
        found = np.where(outside, order._mix(found), found)
    if swaps:
        found = np.where(found < 2, found ^ (swap >> np.uint64(63)), found)
    if num_rounds is None and swaps:
        assert (found[-1] == Permutation(size, int(keys[-1]))(np.arange(size, dtype=np.uint64))).all()
    return found.astype(np.int64)


def excess(counts: npt.NDArray[np.int64], freedom: int) -> float:
    """Return by how many standard deviations the chi-square of equally likely counts exceeds its mean."""
    expected = counts.sum() / counts.size
    return float((((counts - expected) ** 2).sum() / expected - freedom) / math.sqrt(2 * freedom))


def excess_of_orders(orders: Orders) -> float:
    """Return the excess of the counts of all possible orders."""
    size = orders.shape[1]
    numbers = {order: number for number, order in enumerate(itertools.permutations(range(size)))}
    places = size ** np.arange(size)
    number_of = np.zeros(size**size, dtype=np.int64)
    number_of[[int(places @ order) for order in numbers]] = [*numbers.values()]
    return excess(np.bincount(number_of[orders @ places], minlength=len(numbers)), len(numbers) - 1)


def test_every_number_occurs_once_for_any_size() -> None:
    for size in (*range(1, 200), 255, 256, 257, 4095, 4096, 4097, 65537, 10**6):
        found = Permutation(size, derive_seed(1, size))(np.arange(size, dtype=np.uint64))
        assert (np.bincount(found.astype(np.int64), minlength=size) == 1).all(), size


@pytest.mark.parametrize("size", [2, 3, 6, 7])
def test_all_orders_of_few_samples_are_equally_likely(size: int) -> None:
    assert abs(excess_of_orders(by_key(size, 40_000))) < 4


def test_fewer_rounds_or_no_swap_are_detected() -> None:
    assert excess_of_orders(by_key(6, 40_000, num_rounds=8)) > 50
    assert excess_of_orders(by_key(7, 40_000, swaps=False)) > 50


def test_draws_are_in_proportion_to_weights() -> None:
    weights = np.array([0, 1, 0, 0.5, 8.5, 0])
    drawn = WeightedDraws(weights, derive_seed(1, 2))(np.arange(100_000, dtype=np.uint64))
    counts, expected = np.bincount(drawn, minlength=6), weights / weights.sum() * 100_000
    assert counts[[0, 2, 5]].tolist() == [0, 0, 0]
    assert (abs(counts - expected) <= 4 * np.sqrt(expected)).all()
