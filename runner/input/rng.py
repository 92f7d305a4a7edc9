"""Random numbers that depend on a key only: seeds, and what torch, NumPy and random draw while a function runs."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import torch

T = TypeVar("T")
# The last number of a key (seed, epoch, index, …), which separates these streams from those of the trainer and sampler.
TRANSFORMS, SAMPLE, EPOCH, COLLATE = range(2**63, 2**63 + 4)
_BLANK = 0x5EED  # the seed of generators that a function is not known to use
_spare: list[np.random.BitGenerator] = []  # constructing one takes longer than seeding it


def derive_seed(*key: int) -> int:
    """Return a seed in [0, 2**63) that depends on all integers of the key (splitmix64: Steele, Lea, Flood 2014)."""
    state = 0
    for number in key:
        state = (state + number + 0x9E3779B97F4A7C15) % 2**64
        state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB % 2**64
        state ^= state >> 31
    return state % 2**63


def make_generator(*key: int) -> torch.Generator:
    """Return a generator with an independent stream for every key."""
    return torch.Generator().manual_seed(derive_seed(*key))


class _Generator:
    """One of the process's three global generators on the CPU.

    peek: returns a value that depends on the state. It may draw, because the caller seeds the generator afterwards.
    """

    def __init__(self, seed: Callable[[int], Any], peek: Callable[[], Any]):
        self.seed, self.peek = seed, peek
        self._blank: Any = None

    def has_drawn(self) -> bool:
        """Return True if anything was drawn since the generator was seeded with _BLANK."""
        found = self.peek()
        if self._blank is None:
            self.seed(_BLANK)
            self._blank = self.peek()
        return bool(found != self._blank)


_GENERATORS = (
    _Generator(torch.default_generator.manual_seed, lambda: torch.default_generator.get_state().numpy().tobytes()),
    _Generator(lambda key: np.random.seed(key % 2**32), lambda: np.random.bytes(16)),
    _Generator(random.seed, lambda: random.getrandbits(128)),
)


def seed_all(key: int) -> None:
    """Seed torch on the CPU, NumPy and random."""
    for generator in _GENERATORS:
        generator.seed(key)


def seed_step(key: int, device: torch.device) -> None:
    """Seed torch on the CPU and on the device, NumPy and random."""
    seed_all(key)
    if device.type != "cpu":
        torch.manual_seed(key)  # takes 0.2 ms if CUDA is available but not used


@contextmanager
def isolated() -> Iterator[None]:
    """Restore the state of all three generators at exit.

    NumPy gets another bit generator meanwhile, because reading its state takes 35 µs. This drops the second of a pair
    of normal numbers, if NumPy has computed one in advance.
    """
    of_torch, of_python = torch.get_rng_state(), random.getstate()
    of_numpy = np.random.get_bit_generator()  # type: ignore[attr-defined]
    substitute = _spare.pop() if _spare else np.random.MT19937()
    np.random.set_bit_generator(substitute)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        np.random.set_bit_generator(of_numpy)  # type: ignore[attr-defined]
        _spare.append(substitute)
        torch.set_rng_state(of_torch)
        random.setstate(of_python)


@contextmanager
def seeded(*key: int) -> Iterator[None]:
    """Seed all three generators with a key, and restore their state at exit."""
    with isolated():
        seed_all(derive_seed(*key))
        yield


class DrawDetector:
    """Detects which of the three generators a function uses, and seeds only those.

    A call of a function that draws nothing costs 25 to 50 µs more.
    """

    def __init__(self) -> None:
        self._used: list[int] = []  # indices into _GENERATORS

    def __bool__(self) -> bool:
        """Return True if the function has ever drawn."""
        return bool(self._used)

    def call(self, function: Callable[[], T]) -> T:
        """Call the function, and return its result. The generators keep their state.

        A function that draws is called again, because its calls of `seed` have an effect from then on.
        """
        with isolated():
            while True:
                seed_all(_BLANK)
                result = function()
                others = (number for number in range(len(_GENERATORS)) if number not in self._used)
                found = [number for number in others if _GENERATORS[number].has_drawn()]
                if not found:
                    return result
                self._used += found

    def seed(self, *key: int) -> None:
        """Seed what the function uses. The function calls this before it draws."""
        if self._used:
            seed = derive_seed(*key)
            for number in self._used:
                _GENERATORS[number].seed(seed)
