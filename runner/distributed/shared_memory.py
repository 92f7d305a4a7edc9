"""Memory that the ranks of a group on one machine all see, through which they add up what no message takes."""

import mmap
import os
from collections.abc import Callable, Iterator

import torch

PIECE = 2**22  # bytes of each rank at a time: what the caches of most processors hold of a few ranks
_LINE = 64  # bytes: no two ranks write into one line of a cache


def new_file(num_ranks: int) -> int:
    """A file of nobody's folder, for so many ranks: all map it. Raises OSError where the system has none."""
    if not hasattr(os, "memfd_create"):
        raise OSError("this system has no memory without a name")
    file = os.memfd_create("runner")
    try:
        os.ftruncate(file, (num_ranks + 1) * PIECE)  # of which what is never written takes no memory
    except OSError:
        os.close(file)
        raise
    return file


class SharedMemory:
    """A place of PIECE bytes for each of the ranks, and one for their sum. Raises OSError where it cannot be mapped.

    position: this rank's among them. wait_for_all: returns when all ranks have called it as often with that number.
    """

    def __init__(self, file: int, position: int, num_ranks: int, wait_for_all: Callable[[int], None]):
        self._memory = mmap.mmap(file, (num_ranks + 1) * PIECE)
        self._position, self._num_ranks, self._wait_for_all = position, num_ranks, wait_for_all

    def sum(self, flat: torch.Tensor) -> None:
        """In place, in the order of the ranks: (n) on each. Each rank adds up its part of every piece."""
        places = [self._place(number, flat.dtype) for number in range(self._num_ranks + 1)]
        own, total = places[self._position], places[-1]
        for piece in flat.split(len(own)):
            parts = list(self._parts(piece))
            for position, part in enumerate(parts):
                if position != self._position:
                    own[part] = piece[part]
            self._wait_for_all(flat.nbytes)
            part = parts[self._position]
            first, second, *others = (
                piece[part] if position == self._position else place[part] for position, place in enumerate(places[:-1])
            )
            torch.add(first, second, out=total[part])
            for other in others:
                total[part] += other
            self._wait_for_all(flat.nbytes)
            piece.copy_(total[: len(piece)])

    def _place(self, number: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.frombuffer(self._memory, dtype=dtype, count=PIECE // dtype.itemsize, offset=number * PIECE)

    def _parts(self, piece: torch.Tensor) -> Iterator[slice]:
        """What each rank adds up of it, the same on all; the last ones may be empty."""
        line = _LINE // piece.itemsize
        size = -(-len(piece) // (self._num_ranks * line)) * line
        for start in range(0, self._num_ranks * size, size):
            yield slice(min(start, len(piece)), min(start + size, len(piece)))
