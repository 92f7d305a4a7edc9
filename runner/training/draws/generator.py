"""A counter-based generator: each sample has its own stream of random numbers in each call of a random function."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# The constants of SplitMix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014), as int64.
_GAMMA, _FIRST, _SECOND = (
    constant - 2**64 for constant in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)
_DIGITS = {torch.float64: 53, torch.float16: 11, torch.bfloat16: 8}  # of a uniform number; 24 in other dtypes


def sample_keys(indices: Sequence[int], device: torch.device) -> Tensor:
    """Return two keys of each sample, (n, 2)."""
    return random_bits(torch.tensor(indices, dtype=torch.int64, device=device)[:, None].expand(-1, 2), 2)


def random_bits(keys: Tensor, count: int) -> Tensor:
    """Return 64 random bits for each position of each sample, (n, 2) -> (n, count) in int64.

    This is the output function of SplitMix64 for the first key and the position, with the second key added between its
    two rounds. In SplitMix64, two streams overlap if their keys differ by a multiple of the increment.
    """
    state = torch.arange(count, device=keys.device) * _GAMMA + keys[:, :1]
    shifted = torch.empty_like(state)
    for shift, key, factor in ((30, 0, _FIRST), (27, keys[:, 1:], _SECOND), (31, 0, 1)):
        torch.bitwise_right_shift(state, shift, out=shifted)
        shifted &= (1 << (64 - shift)) - 1  # the shift repeats the sign
        state ^= shifted
        if factor != 1:
            state += key
            state *= factor
    return state


@dataclass(frozen=True)
class Rows:
    """The random numbers of one call of a random function, which differ for each sample."""

    keys: Tensor  # two keys per sample, for this call, (n, 2)
    shape: torch.Size  # the shape of the tensor to draw
    dim: int  # the dim of the samples, which may have several entries per sample
    sharded: tuple[int, int, int] | None = None  # a dim that is split, this rank's part, and the number of parts

    def words(self, size: int) -> Tensor:
        """Return 32 or 64 random bits for each element, as integers."""
        whole = list(self.shape)
        if self.sharded is not None:
            whole[self.sharded[0]] *= self.sharded[2]
        whole.insert(0, whole.pop(self.dim))
        count = math.prod(whole) // max(1, len(self.keys))
        if size == 64:
            words = random_bits(self.keys, count)
        else:
            words = random_bits(self.keys, (count + 1) // 2).view(torch.int32)[:, :count]
        words = words.reshape(whole).movedim(0, self.dim)
        if self.sharded is None:
            return words
        dim, number, _ = self.sharded
        return words.narrow(dim, number * self.shape[dim], self.shape[dim])

    def uniform(self, dtype: torch.dtype) -> Tensor:
        """Return uniform numbers in [0, 1): multiples of 2**-53 in float64, and of 2**-24 in float32."""
        size, digits = (64 if dtype == torch.float64 else 32), _DIGITS.get(dtype, 24)
        kept = (self.words(size) >> (size - digits)) & (2**digits - 1)
        return kept.to(dtype) * 2.0**-digits

    def normal(self, dtype: torch.dtype) -> Tensor:
        """Return numbers of the standard normal distribution (Box, Muller, 1958)."""
        words = self.words(64)
        units = [(half.double() + 0.5) * 2.0**-32 for half in ((words >> 32) + 2**31, words & (2**32 - 1))]
        return ((-2 * units[0].log()).sqrt() * (units[1] * (2 * torch.pi)).cos()).to(dtype)

    def bernoulli(self, probability: float) -> Tensor:
        """Return booleans that are True with this probability, rounded to a multiple of 2**-32."""
        return self.words(32) < min(round(probability * 2**32) - 2**31, 2**31 - 1)

    def seeds(self) -> list[int]:
        """Return a seed of each sample, in [0, 2**63)."""
        return [bits % 2**63 for (bits,) in random_bits(self.keys, 1).tolist()]
