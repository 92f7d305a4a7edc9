"""Random numbers that follow from their place, so that no sample has to be kept."""

from torch import Tensor

MASK = 2**32 - 1


def hash_numbers(numbers: Tensor) -> Tensor:
    """A bijection of the integers below 2^32, held in int64: different numbers stay different.

    Both factors are below 2^31, so no product passes 2^63.
    Source: https://github.com/skeeto/hash-prospector ([16 21f0aaad 15 735a2d97 15])
    """
    numbers = (numbers ^ (numbers >> 16)) * 0x21F0AAAD & MASK
    numbers = (numbers ^ (numbers >> 15)) * 0x735A2D97 & MASK
    return numbers ^ (numbers >> 15)
