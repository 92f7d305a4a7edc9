"""Memory that the ranks of a group on one machine all see, through which they add up what no message takes.

In the order of gloo's ring: where the ranks are, and whether they have such memory, changes no bit of what they train.
"""

import mmap
import os
from collections.abc import Callable, Iterator

import torch

PIECE = 2**22  # bytes of each rank at a time: what the caches of most processors hold of a few ranks
_LINE = 64  # bytes: no two ranks write into one line of a cache
_SEGMENT = 2**20  # bytes: the most that gloo's ring sends at once (kMaxSegmentSize in gloo/allreduce.h)


def new_file(num_bytes: int) -> int:
    """A file of nobody's folder, of so many zeros: several processes may map it. Raises OSError where there is none."""
    if not hasattr(os, "memfd_create"):
        raise OSError("this system has no memory without a name")
    file = os.memfd_create("runner")
    try:
        os.ftruncate(file, num_bytes)  # of which what is never written takes no memory
    except OSError:
        os.close(file)
        raise
    return file


def size_for(num_ranks: int) -> int:
    """Bytes of the file by which so many ranks sum."""
    return (num_ranks + 1) * PIECE


class SharedMemory:
    """A place of PIECE bytes for each of the ranks, and one for their sum. Raises OSError where it cannot be mapped.

    position: this rank's among them. wait_for_all: returns when all ranks have called it as often with that number.
    """

    def __init__(self, file: int, position: int, num_ranks: int, wait_for_all: Callable[[int], None]):
        self._memory = mmap.mmap(file, size_for(num_ranks))
        self._position, self._num_ranks, self._wait_for_all = position, num_ranks, wait_for_all

    def sum(self, flat: torch.Tensor) -> None:
        """In place: (n) on each. Each rank adds up its part of every piece, in the order in which gloo's ring would."""
        places = [self._place(number, flat.dtype) for number in range(self._num_ranks + 1)]
        own, total = places[self._position], places[-1]
        chunk = _chunk_of_ring(flat, self._num_ranks)
        for count, piece in enumerate(flat.split(len(own))):
            parts = list(self._parts(piece))
            for position, part in enumerate(parts):
                if position != self._position:
                    own[part] = piece[part]
            self._wait_for_all(flat.nbytes)
            given = [piece if position == self._position else place for position, place in enumerate(places[:-1])]
            for number, part in _by_chunk(parts[self._position], count * len(own), chunk):
                first, second, *others = (given[number - i][part] for i in range(1, self._num_ranks + 1))
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


def _chunk_of_ring(flat: torch.Tensor, num_ranks: int) -> int:
    """How many items of it one rank of gloo's all-reduce ends with the sum of (gloo/allreduce.cc).

    The tensor is cut into as many chunks as there are ranks, the last ones smaller or empty. Rank r's chunk sets out
    from rank r - 1 and goes round the ring in falling order, to r, and each rank on the way adds its own.
    """
    largest = _SEGMENT // flat.itemsize * flat.itemsize
    segments_of_rank = -(-max(-(-flat.nbytes // largest), 2 * num_ranks) // num_ranks)
    return segments_of_rank * -(-len(flat) // (segments_of_rank * num_ranks))


def _by_chunk(part: slice, begin: int, chunk: int) -> Iterator[tuple[int, slice]]:
    """The part, of a piece that begins there, cut where chunks begin; before each its chunk's number."""
    start = part.start
    while start < part.stop:
        number = (begin + start) // chunk
        stop = min(part.stop, (number + 1) * chunk - begin)
        yield number, slice(start, stop)
        start = stop
