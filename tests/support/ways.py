"""The modes, with the world sizes and options in which they give the numbers of one process to the last digits."""

from typing import NamedTuple

import pytest
from worlds import MODES


class Way(NamedTuple):
    """A mode with options on so many ranks."""

    mode: str
    world_size: int
    options: tuple[str, ...] = ()

    @property
    def words(self) -> tuple[str, ...]:
        # In the warm-up of local SGD gradients are summed; its averages are another algorithm.
        own = ("parallel.warmup_steps=100",) if self.mode == "local_sgd" else ()
        return (f"parallel={self.mode}", *own, *self.options)

    @property
    def reference(self) -> tuple[str, ...]:
        """What the one process is told besides: pipeline cuts a micro-batch into four."""
        return ("micro_batches=4",) if self.mode == "pipeline" else ()

    def __str__(self) -> str:
        return "-".join((self.mode, str(self.world_size), *(option.partition(".")[2] for option in self.options)))


def _exists(mode: str, world_size: int) -> bool:
    return world_size == 1 if mode in ("none", "dp") else mode != "ps" or world_size > 1


PLAIN = [Way(mode, size) for mode in MODES for size in (1, 2, 4) if _exists(mode, size)]
WAYS = [
    *PLAIN,
    Way("fsdp", 4, ("parallel.replicate=2",)),
    Way("tp", 4, ("parallel.rest=fsdp",)),
    Way("pipeline", 4, ("parallel.stages=2",)),
    Way("pipeline", 2, ("parallel.schedule=ZBV",)),
    Way("ps", 3, ("parallel.forward=remote",)),
    Way("zero", 2, ("parallel.parameters_as_bucket_view=true",)),
]
# One of each mode, on two ranks where it may have two: what the default tier tests.
SLICE = [way for way in PLAIN if way.world_size == (1 if way.mode in ("none", "dp") else 2)]


def tier(by_default: bool, thorough: bool) -> tuple[pytest.MarkDecorator, ...]:
    """The marks of a cell of a matrix. CI has each mode with each kind of experiment once; the rest is soak."""
    return () if by_default else (pytest.mark.thorough if thorough else pytest.mark.soak,)
