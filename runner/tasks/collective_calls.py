"""One call of each collective on data with a known result, to check and time it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from runner.distributed import collectives


@dataclass(frozen=True)
class CollectiveCall:
    """A collective on this rank's data. All ranks must make the same call."""

    call: Callable[[], Any]
    num_bytes: int  # of the whole data; see runner.tasks.collectives.Measurement
    result: Tensor | None  # written by the call; None if this rank only sends
    expected: list[float]  # the value of each of the result's equal parts after the first call

    def differences(self) -> list[str]:
        """Return a message if the result is not the expected one, otherwise an empty list."""
        if self.result is None:
            return []
        parts = self.result.view(len(self.expected), -1).tolist()
        for expected, part in zip(self.expected, parts, strict=True):
            if wrong := [value for value in part if value != expected]:
                return [f"returned {wrong[0]:g} instead of {expected:g}"]
        return []


def _filled(parts: list[float], per_part: int, device: torch.device) -> Tensor:
    return torch.tensor(parts, dtype=torch.float32, device=device).repeat_interleave(per_part)


# The arguments of the following functions are the rank, the number of ranks n, the number of float32 values per rank
# (the whole data has n times as many) and the device. If rank r sends a single value, it sends r + 1. The root is the
# last rank, so that a collective which ignores its root and uses rank 0 fails the check.


def broadcast(rank: int, n: int, per_rank: int, device: torch.device) -> CollectiveCall:
    data = _filled([rank + 1], n * per_rank, device)
    return CollectiveCall(lambda: dist.broadcast(data, src=n - 1), data.nbytes, data, [n])


def reduce(rank: int, n: int, per_rank: int, device: torch.device) -> CollectiveCall:
    data = _filled([rank + 1], n * per_rank, device)
    result = data if rank == n - 1 else None
    return CollectiveCall(lambda: dist.reduce(data, dst=n - 1), data.nbytes, result, [n * (n + 1) / 2])


def all_reduce(rank: int, n: int, per_rank: int, device: torch.device) -> CollectiveCall:
    data = _filled([rank + 1], n * per_rank, device)
    return CollectiveCall(lambda: dist.all_reduce(data), data.nbytes, data, [n * (n + 1) / 2])


def scatter(rank: int, n: int, per_rank: int, device: torch.device) -> CollectiveCall:
    """The last rank sends 10, 20, ..., one value to each rank."""
    sent = _filled([10.0 * (r + 1) for r in range(n)], per_rank, device)
    chunks = list(sent.chunk(n)) if rank == n - 1 else None
    result = _filled([0], per_rank, device)
    return CollectiveCall(lambda: dist.scatter(result, chunks, src=n - 1), sent.nbytes, result, [10.0 * (rank + 1)])


def gather(rank: int, n: int, per_rank: int, device: torch.device) -> CollectiveCall:
    sent = _filled([rank + 1], per_rank, device)
    result = _filled([0], n * per_rank, device) if rank == n - 1 else None
    chunks = None if result is None else list(result.chunk(n))
    return CollectiveCall(
        lambda: dist.gather(sent, chunks, dst=n - 1), n * sent.nbytes, result, [r + 1.0 for r in range(n)]
    )


def all_gather(rank: int, n: int, per_rank: int, device: torch.device) -> CollectiveCall:
    sent, result = _filled([rank + 1], per_rank, device), _filled([0], n * per_rank, device)
    expected = [r + 1.0 for r in range(n)]
    return CollectiveCall(lambda: collectives.all_gather_single(result, sent), result.nbytes, result, expected)


def reduce_scatter(rank: int, n: int, per_rank: int, device: torch.device) -> CollectiveCall:
    """Rank r contributes r + 1 + s for rank s, which receives the sum over r."""
    sent = _filled([rank + 1.0 + s for s in range(n)], per_rank, device)
    result = _filled([0], per_rank, device)
    expected = [n * (n + 1) / 2 + n * rank]
    return CollectiveCall(lambda: collectives.reduce_scatter_single(result, sent), sent.nbytes, result, expected)


def all_to_all(rank: int, n: int, per_rank: int, device: torch.device) -> CollectiveCall:
    """Rank r sends r n + s to rank s."""
    sent = _filled([float(rank * n + s) for s in range(n)], per_rank, device)
    result = torch.zeros_like(sent)
    expected = [float(r * n + rank) for r in range(n)]
    return CollectiveCall(lambda: dist.all_to_all_single(result, sent), sent.nbytes, result, expected)


def send_recv(rank: int, n: int, per_rank: int, device: torch.device) -> CollectiveCall:
    """Each rank sends to the next rank and receives from the previous one, in a ring."""
    sent, result = _filled([rank + 1], n * per_rank, device), _filled([0], n * per_rank, device)
    after, before = (rank + 1) % n, (rank - 1) % n

    def call() -> None:
        # In one batch: on GPUs a send waits for its receiver, so a ring of single calls would deadlock.
        for work in dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, sent, after), dist.P2POp(dist.irecv, result, before)]
        ):
            work.wait()

    return CollectiveCall(call, sent.nbytes, result, [before + 1.0])


CALLS: dict[str, Callable[[int, int, int, torch.device], CollectiveCall]] = {
    function.__name__: function
    for function in (broadcast, reduce, all_reduce, scatter, gather, all_gather, reduce_scatter, all_to_all, send_recv)
}
