"""Orders by key: each number once, and as even as orders that are drawn and stored as a whole."""

import itertools
import math

import numpy as np
import numpy.typing as npt
import pytest
import torch

from runner.training.keyed_order import Permutation, WeightedDraws, hashed
from runner.training.sampler import generator, mix

Orders = npt.NDArray[np.int64]  # (num_orders, size)


def by_key(size: int, num_orders: int, num_rounds: int | None = None, swaps: bool = True) -> Orders:
    """As Permutation, for many keys at once; with fewer rounds, or without its swap, to see what these are for."""
    order, keys = Permutation(size, 0), hashed(size, np.arange(num_orders, dtype=np.uint64))
    swap, *rounds = hashed(keys[:, None, None], np.arange(1 + len(order._keys), dtype=np.uint64)).T[:, 0, :, None]
    order._keys = rounds[:num_rounds]
    found = order._mixed(np.tile(np.arange(size, dtype=np.uint64), (num_orders, 1)))
    while (outside := found >= size).any():
        found = np.where(outside, order._mixed(found), found)
    if swaps:
        found = np.where(found < 2, found ^ (swap >> np.uint64(63)), found)
    if num_rounds is None and swaps:
        assert (found[-1] == Permutation(size, int(keys[-1]))(np.arange(size, dtype=np.uint64))).all()
    return found.astype(np.int64)


def stored(size: int, num_orders: int) -> Orders:
    random = generator(size)
    return torch.stack([torch.randperm(size, generator=random) for _ in range(num_orders)]).numpy()


def epochs(size: int, num_orders: int) -> Orders:
    """As a run has them."""
    positions = np.arange(size, dtype=np.uint64)
    return np.stack([Permutation(size, mix(3, epoch))(positions) for epoch in range(num_orders)]).astype(np.int64)


def unlikely(counts: npt.NDArray[np.int64], freedom: int) -> float:
    """By how many standard deviations the chi-square of equally likely counts is off."""
    expected = counts.sum() / counts.size
    return float((((counts - expected) ** 2).sum() / expected - freedom) / math.sqrt(2 * freedom))


def of_each_order(orders: Orders) -> float:
    size = orders.shape[1]
    numbers = {order: number for number, order in enumerate(itertools.permutations(range(size)))}
    places = size ** np.arange(size)
    number_of = np.zeros(size**size, dtype=np.int64)
    number_of[[int(places @ order) for order in numbers]] = [*numbers.values()]
    return unlikely(np.bincount(number_of[orders @ places], minlength=len(numbers)), len(numbers) - 1)


def test_every_number_comes_once_whatever_the_size() -> None:
    for size in (*range(1, 200), 255, 256, 257, 4095, 4096, 4097, 65537, 10**6):
        found = Permutation(size, mix(1, size))(np.arange(size, dtype=np.uint64))
        assert (np.bincount(found.astype(np.int64), minlength=size) == 1).all(), size


@pytest.mark.parametrize("size", [2, 3, 4, 5, 6, 7])
def test_of_few_samples_every_order_is_as_likely(size: int) -> None:
    assert abs(of_each_order(by_key(size, 40_000))) < 4
    assert abs(of_each_order(stored(size, 40_000))) < 4


def test_fewer_rounds_or_no_swap_would_show() -> None:
    assert of_each_order(by_key(6, 40_000, num_rounds=8)) > 50
    assert of_each_order(by_key(7, 40_000, swaps=False)) > 50


def of_many(orders: Orders) -> list[float]:
    """By how many standard deviations the places of samples, neighbours and epochs that follow each other are off."""
    num_orders, size = orders.shape
    places = np.argsort(orders, axis=1)
    landed = np.bincount((np.arange(size) * size + orders).ravel(), minlength=size * size)
    steps = np.bincount((np.diff(orders, axis=1) % size).ravel(), minlength=size)[1:]
    measured = [unlikely(landed, (size - 1) ** 2), unlikely(steps, size - 2)]
    centred, variance = orders - (size - 1) / 2, (size**2 - 1) / 12
    deviation = variance * math.sqrt(size * num_orders)
    for lag in (1, 2, 32, 500):  # 32: of the values of a half
        between = np.bincount(((places[:, lag:] - places[:, :-lag]) % size).ravel(), minlength=size)[1:]
        products = (centred[:, lag:] * centred[:, :-lag]).sum() + variance / (size - 1) * (size - lag) * num_orders
        measured += [unlikely(between, size - 2), products / deviation]
    return [*measured, (centred[1:] * centred[:-1]).sum() / deviation]


def test_of_many_samples_places_neighbours_and_epochs_are_unrelated() -> None:
    """By measures that stored orders pass, and those of a network of four rounds do not."""
    size, num_orders = 1000, 1500
    assert max(map(abs, of_many(epochs(size, num_orders)))) < 4
    assert max(map(abs, of_many(stored(size, num_orders)))) < 4
    assert max(map(abs, of_many(by_key(size, num_orders, num_rounds=4)))) > 10


def test_draws_take_what_has_a_weight_in_proportion_to_it() -> None:
    weights = np.array([0, 1, 0, 0.5, 8.5, 0])
    drawn = WeightedDraws(weights)(np.arange(100_000, dtype=np.uint64), mix(1, 2))
    counts, expected = np.bincount(drawn, minlength=6), weights / weights.sum() * 100_000
    assert counts[[0, 2, 5]].tolist() == [0, 0, 0]
    assert (abs(counts - expected) <= 4 * np.sqrt(expected)).all()
    far = np.arange(10**10, 10**10 + 100_000, dtype=np.uint64)
    assert np.array_equal(WeightedDraws(weights)(far[99_000:], 5), WeightedDraws(weights)(far, 5)[99_000:])
