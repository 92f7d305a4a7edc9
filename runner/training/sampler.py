"""Which samples a rank reads, and in which order: from seed, epoch and step alone, whatever the world's size."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch


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
    seed: int = 0
    shuffle: bool = True
    drop_last: bool = False
    max_steps: int | None = None  # of an epoch, its first ones; None: all
    weights: torch.Tensor | None = field(default=None, compare=False)  # (num_samples,) float64; None: each sample once

    @property
    def steps_per_epoch(self) -> int:
        whole, rest = divmod(self.num_samples, self.batch_size)
        steps = whole if self.drop_last else whole + bool(rest)
        return steps if self.max_steps is None else min(steps, self.max_steps)

    def step_size(self, step: int) -> int:
        """Samples in a step of an epoch, over all ranks; steps count from 0."""
        return min(self.batch_size, self.num_samples - step * self.batch_size)

    def num_micro_batches(self, step: int) -> int:
        return min(self.micro_batches, self.step_size(step))

    def shares(self, epoch: int, first_step: int = 0) -> Iterator[list[int]]:
        """This rank's sample indices, one list per micro-batch, from the given step of the epoch on."""
        order = self._order(epoch)
        for step in range(first_step, self.steps_per_epoch):
            start = step * self.batch_size
            batch = order[start : start + self.step_size(step)]
            for number in range(self.num_micro_batches(step)):
                micro_batch = cut(batch, number, self.num_micro_batches(step))
                share = cut(micro_batch, self.data_rank, self.data_ranks) if self.data_rank is not None else batch[:0]
                yield share.tolist()

    def _order(self, epoch: int) -> torch.Tensor:
        if self.weights is not None:
            return draw(self.weights, self.num_samples, generator(self.seed, epoch))
        if not self.shuffle:
            return torch.arange(self.num_samples)
        return torch.randperm(self.num_samples, generator=generator(self.seed, epoch))


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


def cut(items: torch.Tensor, part: int, num_parts: int) -> torch.Tensor:
    """The part-th of num_parts contiguous pieces whose lengths differ by at most one."""
    return items[part * len(items) // num_parts : (part + 1) * len(items) // num_parts]


def draw(weights: torch.Tensor, num_draws: int, random: torch.Generator) -> torch.Tensor:
    """(num_draws,) indices, each with a probability in proportion to its weight, with replacement.

    By the inverse of the distribution: torch.multinomial takes 2^24 weights at most.
    """
    ends = torch.from_numpy(np.cumsum(weights.numpy()))  # one after the other, whatever the number of threads
    places = torch.rand(num_draws, dtype=torch.float64, generator=random) * ends[-1]
    drawn = torch.searchsorted(
        ends, places, right=True
    )  # right: one of weight 0 ends where it starts, and is passed over
    return drawn.clamp_(max=int(weights.nonzero()[-1]))  # a product may be rounded up to the very end


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
