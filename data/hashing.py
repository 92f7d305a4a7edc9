"""Random numbers that are computed from a position, so that samples need not be stored."""

from torch import Tensor

MASK = 2**32 - 1


def hash_numbers(numbers: Tensor) -> Tensor:
    """Map integers below 2^32, stored as int64, one-to-one to random numbers below 2^32.

    Both factors are below 2^31, so that products stay below 2^63.
    Source: https://github.com/skeeto/hash-prospector ([16 21f0aaad 15 735a2d97 15])
    """
    numbers = (numbers ^ (numbers >> 16)) * 0x21F0AAAD & MASK
    numbers = (numbers ^ (numbers >> 15)) * 0x735A2D97 & MASK
    return numbers ^ (numbers >> 15)
