"""Memory shared by the ranks of a group on one machine, in which they sum tensors that are too large for messages.

The order of summation is that of gloo's ring, so that the result is identical to the bit with and without such memory.
"""

import mmap
from collections.abc import Callable, Iterator
from itertools import pairwise

import torch

PIECE = 2**22  # bytes of each rank at a time, so that those of a few ranks fit into the caches of most processors
_SEGMENT = 2**20  # bytes that gloo's ring sends at once (kMaxSegmentSize in gloo/allreduce.h)


def size_for(num_ranks: int) -> int:
    """Return the size in bytes of the file in which `num_ranks` ranks sum."""
    return (num_ranks + 1) * PIECE


class SharedMemory:
    """An area of PIECE bytes for each rank, and one for their sum.

    position: this rank's index among the ranks. wait_for_all: returns when all ranks have called it with that number.
    """

    def __init__(self, file: int, position: int, num_ranks: int, wait_for_all: Callable[[int], None]):
        self._memory = mmap.mmap(file, size_for(num_ranks))
        self._position, self._num_ranks, self._wait_for_all = position, num_ranks, wait_for_all

    def sum(self, flat: torch.Tensor) -> None:
        """Sum a tensor of shape (n) in place. Each rank sums its part of every piece, in the order of gloo's ring."""
        areas = [self._area(number, flat.dtype) for number in range(self._num_ranks + 1)]
        own, total = areas[self._position], areas[-1]
        chunk = _chunk_of_ring(flat, self._num_ranks)
        for count, piece in enumerate(flat.split(len(own))):
            bounds = [len(piece) * position // self._num_ranks for position in range(self._num_ranks + 1)]
            parts = [slice(start, stop) for start, stop in pairwise(bounds)]  # the part that each rank sums
            for position, part in enumerate(parts):
                if position != self._position:
                    own[part] = piece[part]
            self._wait_for_all(flat.nbytes)
            inputs = [piece if position == self._position else area for position, area in enumerate(areas[:-1])]
            for number, part in _by_chunk(parts[self._position], count * len(own), chunk):
                first, second, *others = (inputs[number - i][part] for i in range(1, self._num_ranks + 1))
                torch.add(first, second, out=total[part])
                for other in others:
                    total[part] += other
            self._wait_for_all(flat.nbytes)
            piece.copy_(total[: len(piece)])

    def _area(self, number: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.frombuffer(self._memory, dtype=dtype, count=PIECE // dtype.itemsize, offset=number * PIECE)


def _chunk_of_ring(flat: torch.Tensor, num_ranks: int) -> int:
    """Return the number of items that one rank of gloo's all-reduce sums (gloo/allreduce.cc).

    gloo splits the tensor into one chunk per rank; the last ones are smaller or empty. Rank r's chunk starts at rank
    r - 1 and passes the ring in falling order to r, and each rank on the way adds its own values.
    """
    largest = _SEGMENT // flat.itemsize * flat.itemsize
    segments_of_rank = -(-max(-(-flat.nbytes // largest), 2 * num_ranks) // num_ranks)
    return segments_of_rank * -(-len(flat) // (segments_of_rank * num_ranks))


def _by_chunk(part: slice, begin: int, chunk: int) -> Iterator[tuple[int, slice]]:
    """Split a part of the piece that starts at index `begin`, at the chunks. Yield chunk numbers and slices."""
    start = part.start
    while start < part.stop:
        number = (begin + start) // chunk
        stop = min(part.stop, (number + 1) * chunk - begin)
        yield number, slice(start, stop)
        start = stop
