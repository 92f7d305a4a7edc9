"""The samples that a rank reads, and their order: they depend on seed, epoch and step, not on the number of ranks."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from math import isqrt
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from runner.input.rng import derive_seed

AT_ONCE = 4096  # samples of a rank whose indices are computed together, because most of the cost is per call

Positions = npt.NDArray[np.uint64]
_GAMMA, _ONE, _TWO = (np.uint64(number) for number in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
_HALF = np.uint64(32)  # bits


@dataclass(frozen=True)
class Sampler:
    """Splits each epoch into steps, a step into micro-batches, and a micro-batch among the data ranks.

    The global batch of a step is the same for every number of data ranks. If their number does not divide it, ranks
    get different numbers of samples, and some may get none, but every micro-batch has samples on some rank.
    """

    num_samples: int
    batch_size: int  # samples per step, over all ranks
    micro_batches: int = 1
    data_rank: int | None = 0  # None: this rank reads no samples
    data_ranks: int = 1
    seed: int = 0  # of the order, and of random numbers that reading a sample draws
    shuffle: bool = True
    drop_last: bool = False
    max_steps: int | None = None  # per epoch; None: all
    weights: torch.Tensor | None = field(default=None, compare=False)  # (num_samples,) float64; None: each sample once
    block_ends: Positions | None = field(default=None, compare=False)  # the samples up to the end of each block
    interleaves: bool = False  # a rank reads each data_ranks-th position of an epoch, not successive ones
    window: int | None = None  # number of blocks whose samples are shuffled together; None: all

    @property
    def steps_per_epoch(self) -> int:
        """The number of steps of an epoch."""
        whole, rest = divmod(self.num_samples, self.batch_size)
        steps = whole if self.drop_last else whole + bool(rest)
        return steps if self.max_steps is None else min(steps, self.max_steps)

    def step_size(self, step: int) -> int:
        """Return the number of samples in a step of an epoch, over all ranks; steps count from 0."""
        return min(self.batch_size, self.num_samples - step * self.batch_size)

    @property
    def local_size(self) -> int:
        """The number of samples in the largest local micro-batch."""
        return -(-self.batch_size // (self.micro_batches * self.data_ranks))

    def num_micro_batches(self, step: int) -> int:
        """Return the number of micro-batches in a step of an epoch."""
        return min(self.micro_batches, self.step_size(step))

    def fewest(self, step: int, per_rank: bool) -> int:
        """Return the size of the smallest micro-batch of a step, or of the smallest local one that has samples."""
        size = self.step_size(step) // self.num_micro_batches(step)
        return max(1, size // self.data_ranks) if per_rank else size

    def local_batches(self, epoch: int, first_step: int = 0) -> Iterator[list[int]]:
        """Yield the sample indices of each local micro-batch, starting with the given step of the epoch."""
        indices_at = self._order(epoch)
        num_steps = max(1, AT_ONCE * self.data_ranks // self.batch_size)
        for first in range(first_step, self.steps_per_epoch, num_steps):
            steps = range(first, min(first + num_steps, self.steps_per_epoch))
            local = [positions for step in steps for positions in self.positions(step)]
            at = np.concatenate([np.arange(each.start, each.stop, each.step, dtype=np.uint64) for each in local])
            indices = iter(indices_at(at).tolist())
            for positions in local:
                yield list(itertools.islice(indices, len(positions)))

    def blocks_ahead(self, epoch: int, first_step: int = 0) -> Iterator[list[int]]:
        """Yield, for each step, a sample of each block that should be copied from then on.

        These are the blocks of its window, and as many after its own block as a window has. Each block is yielded once.
        Nothing is yielded for data without blocks or windows.
        """
        if self.block_ends is None or self.window is None or self.weights is not None:
            return
        order = self._order(epoch)
        ends, samples = np.asarray(self.block_ends), np.concatenate([[0], self.block_ends[:-1]])
        if isinstance(order, BlockPermutation):
            ends, samples = order.ends, order.first_samples
        current = np.searchsorted(ends, np.arange(first_step, self.steps_per_epoch) * self.batch_size, side="right")
        copied = current[0] // self.window * self.window
        for end in np.minimum(current + 1 + self.window, len(ends)):
            yield samples[copied:end].tolist()
            copied = end

    def positions(self, step: int) -> list[range]:
        """Return the positions in the epoch of each local micro-batch of a step."""
        start, number = step * self.batch_size, self.num_micro_batches(step)
        if self.data_rank is None:
            return [range(0)] * number
        batch = range(start, start + self.step_size(step))
        parts = [split_range(batch, part, number) for part in range(number)]
        if self.interleaves:
            return [part[(self.data_rank - part.start) % self.data_ranks :: self.data_ranks] for part in parts]
        return [split_range(part, self.data_rank, self.data_ranks) for part in parts]

    def _order(self, epoch: int) -> Callable[[Positions], Any]:
        """Return a function from positions of the epoch, (N,), to sample indices, (N,)."""
        if not self.shuffle:
            return lambda positions: positions
        key = derive_seed(self.seed, epoch)
        if self.weights is not None:
            return WeightedDraws(self.weights.numpy(), key)
        if self.block_ends is None or self.window is None:
            return Permutation(self.num_samples, key)
        return BlockPermutation(self.block_ends, self.window, key)


@dataclass(frozen=True)
class BlockSampler(Sampler):
    """Splits the data in its own order into blocks of the same size for every number of data ranks.

    The shapes that a model processes, and therefore the last bit of its outputs, are those of a single process. A step
    is one block on each data rank, `batch_size` samples in total; in the last step, some ranks may get no samples.
    """

    def positions(self, step: int) -> list[range]:
        if self.data_rank is None:
            return [range(0)]
        size = self.batch_size // self.data_ranks
        start = min(step * self.batch_size + self.data_rank * size, self.num_samples)
        return [range(start, min(start + size, self.num_samples))]


def count_steps(epochs: int, max_steps: int | None, steps_per_epoch: int) -> int:
    """Return the number of optimizer steps of the whole run."""
    return min(epochs * steps_per_epoch, max_steps or epochs * steps_per_epoch)


def split_range(items: range, part: int, num_parts: int) -> range:
    """Return one of `num_parts` contiguous parts, whose lengths differ by at most one."""
    return items[part * len(items) // num_parts : (part + 1) * len(items) // num_parts]


class Permutation:
    """A random permutation of [0, size), which maps positions (N,) to numbers (N,) without being stored.

    A Feistel network over pairs (left, right) of about sqrt(size) values each; each round shifts one half by a hash of
    the other (Black, Rogaway: Ciphers with Arbitrary Finite Domains, 2002). There are fewer than sqrt(size) more pairs
    than numbers. A pair that is not a number is mapped again until it is one, which keeps the map one-to-one.
    """

    def __init__(self, size: int, key: int):
        assert 0 < size <= 2**62, size
        num_left = isqrt(size - 1) + 1
        self._size, self._num_left = np.uint64(size), np.uint64(num_left)
        self._num_right = np.uint64(-(-size // num_left))
        # The fewer values a half has, the less a round mixes. With 6 samples, the worst case, 400,000 orders show
        # unequal probabilities up to 16 rounds; this formula gives 29.
        num_rounds = 8 + 64 // max(1, (size - 1).bit_length())
        swap, *self._keys = splitmix64(key, np.arange(1 + num_rounds, dtype=np.uint64))
        # If both halves have an odd number of values, rounds create even permutations only. Swapping 0 and 1 in half of
        # the orders makes odd permutations equally likely.
        self._swap = swap >> np.uint64(63) if size > 1 else np.uint64(0)

    def __call__(self, positions: Positions) -> Positions:
        found = self._mix(positions)
        (outside,) = np.nonzero(found >= self._size)
        while len(outside):
            found[outside] = self._mix(found[outside])
            outside = outside[found[outside] >= self._size]
        found[found < 2] ^= self._swap
        return found

    def _mix(self, pairs: Positions) -> Positions:
        """Permute the pairs, each of which is encoded as left * num_right + right."""
        left = pairs // self._num_right
        right = pairs - left * self._num_right
        for number, key in enumerate(self._keys):
            if number % 2:
                right = _shift(right, left, key, self._num_right)
            else:
                left = _shift(left, right, key, self._num_left)
        left *= self._num_right
        left += right
        return left


class BlockPermutation:
    """A random permutation of samples that are stored in blocks, so that few blocks are read at a time.

    The blocks are permuted, and then the samples of each window of successive blocks. Only the permuted blocks are
    stored.

    block_ends: (num_blocks,), the number of samples up to the end of each block, increasing.
    """

    def __init__(self, block_ends: Positions, window: int, key: int):
        ends = np.asarray(block_ends, np.uint64)
        sizes = np.diff(ends, prepend=np.uint64(0))
        order_key, *self._keys = splitmix64(key, np.arange(1 + -(-len(ends) // window), dtype=np.uint64))
        order = Permutation(len(ends), int(order_key))(np.arange(len(ends), dtype=np.uint64))
        self.first_samples = ends[order] - sizes[order]  # of the permuted blocks
        self.ends = np.cumsum(sizes[order], dtype=np.uint64)  # the positions up to the end of each of them
        self._shifts = ends[order] - self.ends  # from an index in permuted blocks to a sample; may wrap around
        self._window_ends = self.ends[np.minimum(np.arange(1, len(self._keys) + 1) * window, len(ends)) - 1]

    def __call__(self, positions: Positions) -> Positions:
        found = np.empty_like(positions)
        windows = np.searchsorted(self._window_ends, positions, side="right")
        for number in np.unique(windows):
            start = self._window_ends[number - 1] if number else np.uint64(0)
            (at,) = np.nonzero(windows == number)
            permutation = Permutation(int(self._window_ends[number] - start), int(self._keys[number]))
            found[at] = permutation(positions[at] - start) + start
        found += self._shifts[np.searchsorted(self.ends, found, side="right")]
        return found


class WeightedDraws:
    """Draws at positions (N,), with replacement, from [0, N): each number in proportion to its weight.

    weights: (N,) float64, at least one above 0. Only the cumulative sum of the weights is stored.
    """

    def __init__(self, weights: npt.NDArray[np.float64], key: int):
        self._ends = np.cumsum(weights)  # sequential, so independent of the number of threads
        self._last = np.flatnonzero(weights)[-1]
        self._key = key

    def __call__(self, positions: Positions) -> npt.NDArray[np.int64]:
        uniform = (splitmix64(self._key, positions) >> np.uint64(11)) * 2.0**-53  # in [0, 1)
        # side="right" skips numbers of weight 0, which end where they start.
        drawn: npt.NDArray[np.int64] = np.searchsorted(self._ends, uniform * self._ends[-1], side="right")
        drawn = np.minimum(drawn, self._last)  # the product may be rounded up to the end
        return drawn


def splitmix64(key: int | Positions, counts: Positions) -> Positions:
    """Return numbers of the stream of splitmix64 with this seed (Steele, Lea, Flood 2014), by their positions."""
    return _finalize((counts + np.uint64(1)) * _GAMMA + np.uint64(key))


def _shift(half: Positions, other: Positions, key: np.uint64, size: np.uint64) -> Positions:
    """Return half + a hash of the other half, modulo the number of values of the half (below 2^32)."""
    shifted = _finalize(other + key)
    shifted >>= _HALF
    shifted *= size
    shifted >>= _HALF  # in [0, size), without a division
    shifted += half
    # The difference wraps around to a large number if it is negative.
    np.minimum(shifted, shifted - size, out=shifted)
    return shifted


def _finalize(state: Positions) -> Positions:
    """Hash the numbers in place, and return them."""
    state ^= state >> np.uint64(30)
    state *= _ONE
    state ^= state >> np.uint64(27)
    state *= _TWO
    state ^= state >> np.uint64(31)
    return state
