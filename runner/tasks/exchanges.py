"""One call of each collective on data whose result is worked out by hand, for checking and for timing it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Exchange:
    """A collective on this rank's data; all ranks must make the same call.

    num_bytes: of the whole data; see runner.tasks.collectives.Measurement.
    result: what the call fills in on this rank; None where this rank only gives.
    expected: the value of each of the result's equal parts, after the first call.
    """

    call: Callable[[], Any]
    num_bytes: int
    result: Tensor | None
    expected: list[float]

    def differences(self) -> list[str]:
        """How the result is not what was expected: a message, or none."""
        if self.result is None:
            return []
        parts = self.result.view(len(self.expected), -1).tolist()
        for expected, part in zip(self.expected, parts, strict=True):
            if wrong := [value for value in part if value != expected]:
                return [f"gave {wrong[0]:g} where {expected:g} is right"]
        return []


def _filled(parts: list[float], per_part: int, device: torch.device) -> Tensor:
    return torch.tensor(parts, dtype=torch.float32, device=device).repeat_interleave(per_part)


# Each of the following gets the rank, the number of ranks n, the number of float32 per rank, of which the whole data
# has n times as many, and the device. Rank r gives r + 1 where it gives one value. Where one rank is special it is the
# last, since a collective that took rank 0 whatever it is told would pass otherwise.


def broadcast(rank: int, n: int, per_rank: int, device: torch.device) -> Exchange:
    data = _filled([rank + 1], n * per_rank, device)
    return Exchange(lambda: dist.broadcast(data, src=n - 1), data.nbytes, data, [n])


def reduce(rank: int, n: int, per_rank: int, device: torch.device) -> Exchange:
    data = _filled([rank + 1], n * per_rank, device)
    result = data if rank == n - 1 else None
    return Exchange(lambda: dist.reduce(data, dst=n - 1), data.nbytes, result, [n * (n + 1) / 2])


def all_reduce(rank: int, n: int, per_rank: int, device: torch.device) -> Exchange:
    data = _filled([rank + 1], n * per_rank, device)
    return Exchange(lambda: dist.all_reduce(data), data.nbytes, data, [n * (n + 1) / 2])


def scatter(rank: int, n: int, per_rank: int, device: torch.device) -> Exchange:
    """The last rank gives 10, 20, ..., one to each."""
    given = _filled([10.0 * (r + 1) for r in range(n)], per_rank, device)
    chunks = list(given.chunk(n)) if rank == n - 1 else None
    result = _filled([0], per_rank, device)
    return Exchange(lambda: dist.scatter(result, chunks, src=n - 1), given.nbytes, result, [10.0 * (rank + 1)])


def gather(rank: int, n: int, per_rank: int, device: torch.device) -> Exchange:
    own = _filled([rank + 1], per_rank, device)
    result = _filled([0], n * per_rank, device) if rank == n - 1 else None
    chunks = None if result is None else list(result.chunk(n))
    return Exchange(lambda: dist.gather(own, chunks, dst=n - 1), n * own.nbytes, result, [r + 1.0 for r in range(n)])


def all_gather(rank: int, n: int, per_rank: int, device: torch.device) -> Exchange:
    own, result = _filled([rank + 1], per_rank, device), _filled([0], n * per_rank, device)
    expected = [r + 1.0 for r in range(n)]
    return Exchange(lambda: dist.all_gather_into_tensor(result, own), result.nbytes, result, expected)


def reduce_scatter(rank: int, n: int, per_rank: int, device: torch.device) -> Exchange:
    """Rank r gives r + 1 + s for rank s, which gets their sum over r."""
    given = _filled([rank + 1.0 + s for s in range(n)], per_rank, device)
    result = _filled([0], per_rank, device)
    expected = [n * (n + 1) / 2 + n * rank]
    return Exchange(lambda: dist.reduce_scatter_tensor(result, given), given.nbytes, result, expected)


def all_to_all(rank: int, n: int, per_rank: int, device: torch.device) -> Exchange:
    """Rank r gives r n + s to rank s."""
    given = _filled([float(rank * n + s) for s in range(n)], per_rank, device)
    result = torch.zeros_like(given)
    expected = [float(r * n + rank) for r in range(n)]
    return Exchange(lambda: dist.all_to_all_single(result, given), given.nbytes, result, expected)


def send_recv(rank: int, n: int, per_rank: int, device: torch.device) -> Exchange:
    """Each rank sends to the next one and receives from the one before, in a ring."""
    own, result = _filled([rank + 1], n * per_rank, device), _filled([0], n * per_rank, device)
    there, back = (rank + 1) % n, (rank - 1) % n

    def call() -> None:
        # In one batch: on GPUs, where a send waits for its receiver, a ring of single calls would stand still.
        for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, own, there), dist.P2POp(dist.irecv, result, back)]):
            work.wait()

    return Exchange(call, own.nbytes, result, [back + 1.0])


EXCHANGES: dict[str, Callable[[int, int, int, torch.device], Exchange]] = {
    function.__name__: function
    for function in (broadcast, reduce, all_reduce, scatter, gather, all_gather, reduce_scatter, all_to_all, send_recv)
}
