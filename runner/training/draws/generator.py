"""A counter-based generator: each sample has its own stream of random numbers in each call of a random function."""

import functools
from dataclasses import dataclass

import torch
from torch import Tensor
from torch._C._functorch import _add_batch_dim, peek_interpreter_stack
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

# The constants of SplitMix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014), as int64.
_GAMMA, _FIRST, _SECOND = (
    constant - 2**64 for constant in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)
# A multiplier for congruential generators (Steele, Vigna, "Computationally easy, spectrally good multipliers for
# congruential pseudorandom number generators", 2022). `_steps` explains its use.
_MULTIPLIER = 0xD1342543DE82EF95
_DIGITS = {torch.float64: 53, torch.float16: 11, torch.bfloat16: 8}  # of a uniform number; 24 in other dtypes


def sample_keys(indices: Tensor) -> Tensor:
    """Return two keys of each sample, (n, 2), given the indices of the samples, (n,) in int64."""
    index = indices[:, None]
    return random_bits(torch.arange(2, device=indices.device) * _GAMMA, index, index)


def random_bits(positions: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """Return 64 random bits for each position and pair of keys, which are broadcast, in int64.

    This is the output function of SplitMix64 for the sum of the first key and the position, with the second key added
    between its two rounds. In SplitMix64, two streams overlap if their keys differ by a multiple of the increment.
    """
    state = positions + first
    shifted = torch.empty_like(state)
    for shift, key, factor in ((30, 0, _FIRST), (27, second, _SECOND), (31, 0, 1)):
        torch.bitwise_right_shift(state, shift, out=shifted)
        shifted &= (1 << (64 - shift)) - 1  # the shift repeats the sign
        state ^= shifted
        if factor != 1:
            state += key
            state *= factor
    return state


@functools.cache
def _steps(count: int) -> list[int]:
    """Return the distance of the positions of neighbors along each of the last dims, as int64.

    It is the increment of SplitMix64 along the last dim, and grows by the factor `_MULTIPLIER` with each dim before it.
    Two elements of a tensor have the same position if the differences s0, s1, ... of their indices solve
    s0 + s1 * factor + s2 * factor**2 + ... = 0 modulo 2**64. The spectral test measures the shortest solution: the
    factor was chosen to make it longer than 4e9, 2e6, 6e4 and 7e3 in 2, 3, 4 and 5 dims, close to the largest possible.
    """
    steps = [_GAMMA * pow(_MULTIPLIER, power, 2**64) % 2**64 for power in reversed(range(count))]
    return [step - 2**64 if step >= 2**63 else step for step in steps]


@dataclass(frozen=True)
class Rows:
    """The random numbers of one call of a random function, which differ for each sample.

    The number of an element depends on its indices along the other dims, and not on the sizes of the dims, so that
    padding of samples changes none of their numbers.

    Attributes:
        keys: Two keys per sample, for this call, (n, 2).
        shape: The shape of the tensor to draw.
        dim: The dim of the samples. It may have several entries per sample.
        repeats: How many times the samples occur along the dim. The entries of a sample in one occurrence are adjacent.
        start: The first index along each dim, if the tensor is a part of the tensor to draw. Along the dim of the
            samples, it is the first of the adjacent entries of a sample.
        levels: The levels of torch.vmap whose iterations are the first dims of the shape, from the outermost.
    """

    keys: Tensor
    shape: torch.Size
    dim: int
    repeats: int = 1
    start: tuple[int, ...] = ()
    levels: tuple[int, ...] = ()

    def words(self, size: int) -> Tensor:
        """Return 32 or 64 random bits for each element, as integers."""
        if peek_interpreter_stack() is None:
            return self._words(size)
        with temporarily_clear_interpreter_stack():  # also of torch.func.grad
            words = self._words(size)
            for level in self.levels:
                words = _add_batch_dim(words, 0, level)
            return words

    def _words(self, size: int) -> Tensor:
        if not self.shape.numel():  # such as the features of no token
            return torch.empty(self.shape, dtype=torch.int32 if size == 32 else torch.int64, device=self.keys.device)
        dim, count = self.dim, len(self.keys)
        width = self.shape[dim] // max(1, count * self.repeats)
        start = self.start or (0,) * len(self.shape)
        # Split the dim of the samples: (..., repeats, samples, adjacent entries, ...).
        sizes = [*self.shape[:dim], self.repeats, count, width, *self.shape[dim + 1 :]]
        starts = [*start[:dim], 0, 0, *start[dim:]]
        offset = 0
        if size == 32:  # the two halves of 64 bits belong to neighbors along the last dim
            starts[-1], offset = divmod(starts[-1], 2)
            sizes[-1] = (sizes[-1] + offset + 1) // 2
        terms: list[Tensor] = []
        for number in reversed(range(len(sizes))):
            if number != dim + 1 and (not terms or starts[number] or sizes[number] != 1):
                indices = torch.arange(starts[number], starts[number] + sizes[number], device=self.keys.device)
                terms.append((indices * _steps(len(sizes))[number]).view(-1, *[1] * (len(sizes) - number - 1)))
        first, second = self.keys.T.reshape(2, count, *[1] * (len(sizes) - dim - 2))
        words = random_bits(functools.reduce(torch.add, terms), first, second).expand(sizes)
        if size == 32:
            last = self.shape[-1] if dim + 1 < len(self.shape) else width
            words = words.view(torch.int32).narrow(-1, offset, last)
        return words.reshape(self.shape)

    def uniform(self, dtype: torch.dtype) -> Tensor:
        """Return uniform numbers in [0, 1): multiples of 2**-53 in float64, and of 2**-24 in float32."""
        size, digits = (64 if dtype == torch.float64 else 32), _DIGITS.get(dtype, 24)
        kept: Tensor = (self.words(size) >> (size - digits)) & (2**digits - 1)
        return kept.to(dtype).mul(2.0**-digits)

    def positive(self, dtype: torch.dtype) -> Tensor:
        """Return uniform numbers in (0, 1), in float64 or float32: odd multiples of 2**-53 or of 2**-24."""
        exact = torch.float64 if dtype == torch.float64 else torch.float32
        size, digits = (64, 52) if dtype == torch.float64 else (32, 23)
        kept: Tensor = (self.words(size) >> (size - digits)) & (2**digits - 1)
        return kept.to(exact).add(0.5).mul(2.0**-digits)

    def normal(self, dtype: torch.dtype) -> Tensor:
        """Return numbers of the standard normal distribution (Box, Muller, 1958)."""
        words = self.words(64)
        units = [(half.double() + 0.5) * 2.0**-32 for half in ((words >> 32) + 2**31, words & (2**32 - 1))]
        return ((-2 * units[0].log()).sqrt() * (units[1] * (2 * torch.pi)).cos()).to(dtype)

    def bernoulli(self, probability: float) -> Tensor:
        """Return booleans that are True with this probability, rounded to a multiple of 2**-32."""
        return self.words(32) < min(round(probability * 2**32) - 2**31, 2**31 - 1)

    def integers(self, low: int, high: int) -> Tensor:
        """Return integers in [low, high); the probabilities differ by less than (high - low) * 2**-63."""
        bits = self.words(64) & (2**63 - 1)
        return bits if (low, high) == (0, 2**63) else bits % (high - low) + low

    def seeds(self) -> list[int]:
        """Return a seed of each sample, in [0, 2**63)."""
        first, second = self.keys.T
        return [bits % 2**63 for bits in random_bits(torch.zeros_like(first), first, second).tolist()]
