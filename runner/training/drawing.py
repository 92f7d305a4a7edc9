"""What torch, NumPy and random draw while something is read or computed: from a key alone, whatever drew before it."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import torch

from runner.training.sampler import mix

T = TypeVar("T")
# What a key of (seed, epoch, index) is completed by: streams apart from each other, from the trainer's and the order's.
TRANSFORMS, SAMPLE, EPOCH, COLLATE = range(2**63, 2**63 + 4)
_BLANK = 0x5EED  # what is drawn from before anything is known to be drawn
_spare: list[np.random.BitGenerator] = []  # making one takes longer than seeding it


class _Source:
    """One of the process's three global generators, of the CPU."""

    def __init__(self, seed: Callable[[int], Any], peek: Callable[[], Any]):
        self.seed, self.peek = seed, peek  # peek: what follows; it may be drawn, for the next thing done is to seed
        self._blank: Any = None

    def has_drawn(self) -> bool:
        """Whether anything was drawn since it was seeded with _BLANK."""
        found = self.peek()
        if self._blank is None:
            self.seed(_BLANK)
            self._blank = self.peek()
        return bool(found != self._blank)


_SOURCES = (
    _Source(torch.default_generator.manual_seed, lambda: torch.default_generator.get_state().numpy().tobytes()),
    _Source(lambda key: np.random.seed(key % 2**32), lambda: np.random.bytes(16)),
    _Source(random.seed, lambda: random.getrandbits(128)),
)


def seed_sources(key: int) -> None:
    """Let all three draw from the key; torch on the CPU."""
    for source in _SOURCES:
        source.seed(key)


def seed_step(key: int, device: torch.device) -> None:
    """Let all three draw from the key, torch on the device too."""
    seed_sources(key)
    if device.type != "cpu":
        torch.manual_seed(key)  # it takes 0.2 ms where CUDA is there and not in use


@contextmanager
def apart() -> Iterator[None]:
    """Whatever is seeded and drawn within, the three go on afterwards as they were.

    NumPy has another generator meanwhile: to get its state takes 35 µs. A normal number that it had drawn in advance
    is dropped by that.
    """
    of_torch, of_python = torch.get_rng_state(), random.getstate()
    of_numpy = np.random.get_bit_generator()  # type: ignore[attr-defined]
    own = _spare.pop() if _spare else np.random.MT19937()
    np.random.set_bit_generator(own)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        np.random.set_bit_generator(of_numpy)  # type: ignore[attr-defined]
        _spare.append(own)
        torch.set_rng_state(of_torch)
        random.setstate(of_python)


@contextmanager
def drawing_from(*key: int) -> Iterator[None]:
    """Within, the three draw from the key; afterwards they go on as they were."""
    with apart():
        seed_sources(mix(*key))
        yield


class Draws:
    """Finds out which of the three a function draws from, and lets it draw from keys.

    Only those are seeded that it draws from: for one that draws nothing this takes 25 to 50 µs a call.
    """

    def __init__(self) -> None:
        self._drawn: list[int] = []  # places in _SOURCES

    def __bool__(self) -> bool:
        """Whether it has ever drawn."""
        return bool(self._drawn)

    def call(self, function: Callable[[], T]) -> T:
        """What the function returns. Once it has drawn, `seed` has an effect, for which it is called again.

        The three go on afterwards as they were.
        """
        with apart():
            while True:
                seed_sources(_BLANK)
                result = function()
                others = (place for place in range(len(_SOURCES)) if place not in self._drawn)
                found = [place for place in others if _SOURCES[place].has_drawn()]
                if not found:
                    return result
                self._drawn += found

    def seed(self, *key: int) -> None:
        """To be called by the function: what it draws from there on follows from the key."""
        if self._drawn:
            mixed = mix(*key)
            for place in self._drawn:
                _SOURCES[place].seed(mixed)
