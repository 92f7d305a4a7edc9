"""Which samples a rank reads, and in which order: from seed, epoch and step alone, whatever the world's size."""

import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from runner.runs.train_state import OLDER_ORDER, ORDER
from runner.training.keyed_order import Permutation, Positions, WeightedDraws
from runner.training.older_order import older_order

AT_ONCE = 4096  # samples of a rank whose indices are computed together: for the few of one step most of it is overhead


@dataclass(frozen=True)
class Sampler:
    """Cuts each epoch's order into steps, a step into micro-batches, and a micro-batch among the data ranks.

    The global batch of a step is the same for every number of data ranks. One that does not divide is cut unevenly;
    then a rank's share of a micro-batch may be empty, but a micro-batch that is empty for all ranks is not made.
    """

    num_samples: int
    batch_size: int  # samples per step, over all ranks
    micro_batches: int = 1
    data_rank: int | None = 0  # None reads nothing
    data_ranks: int = 1
    seed: int = 0  # of the order, and of what samples draw as they are read
    shuffle: bool = True
    drop_last: bool = False
    max_steps: int | None = None  # of an epoch, its first ones; None: all
    weights: torch.Tensor | None = field(default=None, compare=False)  # (num_samples,) float64; None: each sample once
    order: int = ORDER  # or OLDER_ORDER

    @property
    def steps_per_epoch(self) -> int:
        whole, rest = divmod(self.num_samples, self.batch_size)
        steps = whole if self.drop_last else whole + bool(rest)
        return steps if self.max_steps is None else min(steps, self.max_steps)

    def step_size(self, step: int) -> int:
        """Samples in a step of an epoch, over all ranks; steps count from 0."""
        return min(self.batch_size, self.num_samples - step * self.batch_size)

    @property
    def share_size(self) -> int:
        """Samples in the largest share of a whole step."""
        return -(-self.batch_size // (self.micro_batches * self.data_ranks))

    def num_micro_batches(self, step: int) -> int:
        return min(self.micro_batches, self.step_size(step))

    def shares(self, epoch: int, first_step: int = 0) -> Iterator[list[int]]:
        """This rank's sample indices, one list per micro-batch, from the given step of the epoch on."""
        indices_at = self._order(epoch)
        num_steps = max(1, AT_ONCE * self.data_ranks // self.batch_size)
        for first in range(first_step, self.steps_per_epoch, num_steps):
            steps = range(first, min(first + num_steps, self.steps_per_epoch))
            own = [positions for step in steps for positions in self._positions(step)]
            at = np.concatenate([np.arange(each.start, each.stop, dtype=np.uint64) for each in own])
            indices = iter(indices_at(at).tolist())
            for positions in own:
                yield list(itertools.islice(indices, len(positions)))

    def _positions(self, step: int) -> list[range]:
        """Where in an epoch this rank's shares of a step are, one for each micro-batch."""
        start, number = step * self.batch_size, self.num_micro_batches(step)
        if self.data_rank is None:
            return [range(0)] * number
        batch = range(start, start + self.step_size(step))
        return [cut(cut(batch, part, number), self.data_rank, self.data_ranks) for part in range(number)]

    def _order(self, epoch: int) -> Callable[[Positions], Any]:
        """What gives the sample indices at positions of the epoch, (N,) of (N,)."""
        if not self.shuffle:
            return lambda positions: positions
        if self.order == OLDER_ORDER:
            whole = older_order(self.num_samples, self.weights, generator(self.seed, epoch)).numpy()
            return lambda positions: whole[positions]
        if self.weights is not None:
            return functools.partial(self._draws, key=mix(self.seed, epoch))
        return Permutation(self.num_samples, mix(self.seed, epoch))

    @functools.cached_property
    def _draws(self) -> WeightedDraws:
        assert self.weights is not None
        return WeightedDraws(self.weights.numpy())


@dataclass(frozen=True)
class Pieces(Sampler):
    """The data in its own order, in pieces of the same samples for every number of data ranks, dealt to them in turn.

    So the shape of what a model computes at a time, and with it the last bit of a number, is that of one process. A
    step is a piece on each data rank, `batch_size` samples over all of them; where there are no more pieces, a share is
    empty.
    """

    def shares(self, epoch: int, first_step: int = 0) -> Iterator[list[int]]:
        size = self.batch_size // self.data_ranks
        for step in range(first_step, self.steps_per_epoch):
            if self.data_rank is None:
                yield []
                continue
            start = min(step * self.batch_size + self.data_rank * size, self.num_samples)
            yield list(range(start, min(start + size, self.num_samples)))


def cut(items: range, part: int, num_parts: int) -> range:
    """The part-th of num_parts contiguous pieces whose lengths differ by at most one."""
    return items[part * len(items) // num_parts : (part + 1) * len(items) // num_parts]


def generator(*key: int) -> torch.Generator:
    """A random stream of its own for every key."""
    return torch.Generator().manual_seed(mix(*key))


def mix(*key: int) -> int:
    """A seed in [0, 2**63) from integers; near keys give unlike seeds (splitmix64: Steele, Lea, Flood 2014)."""
    state = 0
    for number in key:
        state = (state + number + 0x9E3779B97F4A7C15) % 2**64
        state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB % 2**64
        state ^= state >> 31
    return state % 2**63
