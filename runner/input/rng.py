"""Random numbers that depend on a key only: seeds, and what torch, NumPy and random draw while a function runs."""

import functools
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import numpy as np
import torch

T = TypeVar("T")
CPU = torch.device("cpu")
# The last number of a key (seed, epoch, index, …), which separates these streams from those of the trainer and sampler.
TRANSFORMS, SAMPLE, EPOCH, COLLATE, UPDATE = range(2**63, 2**63 + 5)
_BLANK = 0x5EED  # the seed while it is unknown whether a function draws random numbers
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


def seed_torch(key: int, device: torch.device) -> None:
    """Seed torch on the CPU and on the device. torch.manual_seed takes 1.3 ms, for tracebacks of unused devices."""
    torch.default_generator.manual_seed(key)
    if device.type == "cuda":
        torch.cuda.manual_seed_all(key)


def seed_all(key: int, device: torch.device = CPU) -> None:
    """Seed torch on the CPU and on the device, NumPy and random."""
    seed_torch(key, device)
    np.random.seed(key % 2**32)
    random.seed(key)


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


def host_generators() -> tuple[object, ...]:
    """Return the states of the three generators on the CPU."""
    of_numpy = np.random.get_state(legacy=False)
    of_torch = torch.default_generator.get_state().numpy().tobytes()
    return of_torch, random.getstate(), of_numpy["state"]["key"].tobytes(), of_numpy["state"]["pos"]


class DrawDetector:
    """Detects whether a function draws from one of the three generators, and seeds them only then.

    A call of a function that draws nothing costs 25 to 50 µs more.
    """

    def __init__(self) -> None:
        self.has_drawn = False

    def call(self, function: Callable[[], T]) -> T:
        """Call the function, and return its result. The generators keep their state.

        If the function has drawn for the first time, it is called again, because `seed` has an effect from then on.
        """
        with isolated():
            while True:
                seed_all(_BLANK)
                result = function()
                if self.has_drawn or _peek() == _blank():
                    return result
                self.has_drawn = True

    def seed(self, *key: int) -> None:
        """Seed the generators if the function is known to draw. The function must call this before it draws."""
        if self.has_drawn:
            seed_all(derive_seed(*key))


def _peek() -> tuple[object, ...]:
    """Return values that depend on the states of all three generators. This draws from two of them."""
    return torch.default_generator.get_state().numpy().tobytes(), np.random.bytes(16), random.getrandbits(128)


@functools.cache
def _blank() -> tuple[object, ...]:
    """Return what `_peek` returns if nothing was drawn since the generators were seeded with _BLANK."""
    seed_all(_BLANK)
    return _peek()
