"""The modes, with world sizes and options in which they must produce the numbers of one process."""

import math
from typing import NamedTuple

import pytest
from worlds import MODES


class Case(NamedTuple):
    """A mode with options on a number of ranks."""

    mode: str
    world_size: int
    options: tuple[str, ...] = ()

    @property
    def overrides(self) -> tuple[str, ...]:
        # Local SGD sums gradients only during its warm-up; afterwards it is another algorithm.
        warmup = ("parallel.warmup_steps=100",) if self.mode == "local_sgd" else ()
        return (f"parallel={self.mode}", *warmup, *self.options)

    @property
    def reference(self) -> tuple[str, ...]:
        """Additional overrides for the single process: pipeline splits a micro-batch into four."""
        return ("micro_batches=4",) if self.mode == "pipeline" else ()

    def __str__(self) -> str:
        return "-".join((self.mode, str(self.world_size), *(option.partition(".")[2] for option in self.options)))


def _exists(mode: str, world_size: int) -> bool:
    return world_size == 1 if mode in ("none", "dp") else mode != "ps" or world_size > 1


PLAIN = [Case(mode, size) for mode in MODES for size in (1, 2, 4) if _exists(mode, size)]
CASES = [
    *PLAIN,
    Case("fsdp", 4, ("parallel.replicate=2",)),
    Case("tp", 4, ("parallel.rest=fsdp",)),
    Case("pipeline", 4, ("parallel.stages=2",)),
    Case("pipeline", 2, ("parallel.schedule=ZBV",)),
    Case("ps", 3, ("parallel.forward=remote",)),
    Case("zero", 2, ("parallel.parameters_as_bucket_view=true",)),
]
# Each mode once, on two ranks if it supports several.
ONCE = [case for case in PLAIN if case.world_size == (1 if case.mode in ("none", "dp") else 2)]


def mesh(axes: str) -> tuple[int, tuple[str, ...]]:
    """Return the number of ranks of a mesh, such as "shard=2 tensor=2", and its overrides."""
    options = dict(option.split("=") for option in axes.split())
    axes_of_ranks = ("replicate", "shard", "sequence", "stage", "tensor")
    sizes = [int(options[axis]) for axis in axes_of_ranks if options.get(axis, "").isdigit()]
    return math.prod(sizes), ("parallel=mesh", *(f"parallel.{key}={value}" for key, value in options.items()))


def tier(by_default: bool, thorough: bool) -> tuple[pytest.MarkDecorator, ...]:
    """Return the marks of a cell of a matrix. CI has those that can find different errors; others are soak."""
    return () if by_default else (pytest.mark.thorough if thorough else pytest.mark.soak,)
