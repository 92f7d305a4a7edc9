"""Random orders of which any position is computed by itself, from a key: no more is stored than what is asked for."""

from math import isqrt

import numpy as np
import numpy.typing as npt

Positions = npt.NDArray[np.uint64]
_GAMMA, _ONE, _TWO = (np.uint64(number) for number in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
_HALF = np.uint64(32)  # bits


class Permutation:
    """A random permutation of [0, size): called with positions (N,), it gives what stands there, (N,).

    A Feistel network over pairs (left, right) of about sqrt(size) values each, one half moved by a hash of the other in
    each round (Black, Rogaway: Ciphers with Arbitrary Finite Domains, 2002). There are less than sqrt(size) more pairs
    than numbers; from a pair that is no number it goes on until it comes to one, which keeps it one to one.
    """

    def __init__(self, size: int, key: int):
        assert 0 < size <= 2**62, size
        num_left = isqrt(size - 1) + 1
        self._size, self._num_left = np.uint64(size), np.uint64(num_left)
        self._num_right = np.uint64(-(-size // num_left))
        # The fewer values a half has, the less a round mixes: of 6 samples, the worst, 400,000 orders show up to 16
        # rounds that some are more likely, and there are 29.
        num_rounds = 8 + 64 // max(1, (size - 1).bit_length())
        swap, *self._keys = hashed(key, np.arange(1 + num_rounds, dtype=np.uint64))
        # Where both halves have an odd number of values, rounds make even permutations alone: the odd ones become as
        # likely by a swap of 0 and 1 in half of the orders.
        self._swap = swap >> np.uint64(63) if size > 1 else np.uint64(0)

    def __call__(self, positions: Positions) -> Positions:
        found = self._mixed(positions)
        (outside,) = np.nonzero(found >= self._size)
        while len(outside):
            found[outside] = self._mixed(found[outside])
            outside = outside[found[outside] >= self._size]
        found[found < 2] ^= self._swap
        return found

    def _mixed(self, places: Positions) -> Positions:
        """One to one among the pairs, each as left * num_right + right."""
        left = places // self._num_right
        right = places - left * self._num_right
        for number, key in enumerate(self._keys):
            if number % 2:
                right = _moved(right, left, key, self._num_right)
            else:
                left = _moved(left, right, key, self._num_left)
        left *= self._num_right
        left += right
        return left


class WeightedDraws:
    """Draws with replacement of [0, N), each number with a probability in proportion to its weight.

    weights: (N,) float64, at least one above 0. By the inverse of the distribution; what is stored is its N ends.
    """

    def __init__(self, weights: npt.NDArray[np.float64]):
        self._ends = np.cumsum(weights)  # one after the other, whatever the number of threads
        self._last = np.flatnonzero(weights)[-1]

    def __call__(self, positions: Positions, key: int) -> npt.NDArray[np.int64]:
        """What is drawn at these positions, (N,)."""
        uniform = (hashed(key, positions) >> np.uint64(11)) * 2.0**-53  # in [0, 1)
        # right: one of weight 0 ends where it starts, and is passed over
        drawn = np.searchsorted(self._ends, uniform * self._ends[-1], side="right")
        return np.minimum(drawn, self._last)  # a product may be rounded up to the very end


def hashed(key: int | Positions, counts: Positions) -> Positions:
    """The numbers that splitmix64, seeded with the key, gives at these places of its stream (Steele, Lea, Flood 2014).

    Counts and key may be of any two shapes that broadcast.
    """
    return _finalized((counts + np.uint64(1)) * _GAMMA + np.uint64(key))


def _moved(half: Positions, other: Positions, key: np.uint64, size: np.uint64) -> Positions:
    """half + a hash of the other, modulo the number of values of a half (below 2^32)."""
    moved = _finalized(other + key)
    moved >>= _HALF
    moved *= size
    moved >>= _HALF  # in [0, size), without a division
    moved += half
    return np.minimum(moved, moved - size)  # which wraps around to a large number where it would be below 0


def _finalized(state: Positions) -> Positions:
    """In place."""
    state ^= state >> np.uint64(30)
    state *= _ONE
    state ^= state >> np.uint64(27)
    state *= _TWO
    state ^= state >> np.uint64(31)
    return state
