"""The collectives of a step: what is summed over all ranks, and the vote. In a world of one each is the identity."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from runner.distributed.local_exchange import exchange_of, is_small


def sum_over(group: dist.ProcessGroup | None, tensor: torch.Tensor) -> None:
    """Sum the tensor over the group's ranks, in place. All of them must call it; None is all ranks.

    A small one on the CPU is summed in the order of the ranks, wherever they are, a large one on one machine.
    """
    exchange, num_ranks = exchange_of(group), dist.get_world_size(group)
    if not is_small(tensor, num_ranks):
        if exchange is None or not exchange.sum_large(tensor):
            dist.all_reduce(tensor, group=group)
    elif exchange is not None:
        exchange.sum(tensor)
    else:
        first, *others = gather_over(group, tensor)
        for other in others:
            first += other
        tensor.copy_(first)


def max_over(group: dist.ProcessGroup | None, tensor: torch.Tensor) -> None:
    """As `sum_over`, of the largest."""
    exchange = exchange_of(group)
    if exchange is not None and is_small(tensor, dist.get_world_size(group)):
        exchange.max(tensor)
    else:
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=group)


def gather_over(group: dist.ProcessGroup | None, tensor: torch.Tensor) -> torch.Tensor:
    """The tensors of the group's ranks, in their order.  (...) -> (N, ...)  All of them must call it."""
    exchange, num_ranks = exchange_of(group), dist.get_world_size(group)
    if exchange is not None and is_small(tensor, num_ranks):
        return exchange.gather(tensor)
    gathered = tensor.new_empty(num_ranks, *tensor.shape)
    dist.all_gather([*gathered], tensor, group=group)
    return gathered


class Collectives:
    """Over all ranks of a world, once its process group is formed."""

    def __init__(self, world_size: int):
        self._world_size = world_size

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor summed over all ranks, in place. All ranks must call it."""
        if self._world_size > 1:
            sum_over(None, tensor)
        return tensor

    def sum_together(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        """Several of a device in one exchange, in the dtype that holds them all. All ranks must call it."""
        flat = self.sum(torch.cat([tensor.flatten() for tensor in tensors]))
        parts = flat.split([tensor.numel() for tensor in tensors])
        return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]

    def gather(self, rows: torch.Tensor) -> torch.Tensor:
        """The rows of all ranks after each other: (n, ...) on each -> (sum of n, ...). All ranks must call it.

        All but the first dim, and the dtype, must be the same on all ranks.
        """
        if self._world_size == 1:
            return rows
        sizes = torch.zeros(self._world_size, dtype=torch.int64, device=rows.device)
        sizes[dist.get_rank()] = len(rows)
        counts = self.sum(sizes).tolist()
        if not any(counts):
            return rows
        # As bytes, which every backend can send, and all of one length, which all_gather asks for.
        own = rows.contiguous().flatten().view(torch.uint8)
        row_bytes = rows[:1].new_empty(rows.shape[1:]).numel() * rows.element_size()
        padded = own.new_zeros(max(counts) * row_bytes)
        padded[: len(own)] = own
        gathered = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(gathered, padded)
        parts = [part[: count * row_bytes] for part, count in zip(gathered, counts, strict=True)]
        return torch.cat(parts).view(rows.dtype).reshape(sum(counts), *rows.shape[1:])

    def collect(self, value: Any) -> list[Any] | None:
        """What each rank gave, by rank, on rank 0; None on the others. All ranks must call it."""
        if self._world_size == 1:
            return [value]
        collected: list[Any] | None = [None] * self._world_size if dist.get_rank() == 0 else None
        dist.gather_object(value, collected, dst=0)
        return collected

    def any_later(self, flag: bool) -> Callable[[], bool]:
        """Start asking whether the flag is set on any rank; call the result for the answer. All ranks must call it.

        It runs on the CPU beside whatever comes next, so that nobody waits for a device to ask.
        """
        answers = self.any_of_later(flag)
        return lambda: answers()[0]

    def any_of_later(self, *flags: bool) -> Callable[[], list[bool]]:
        """As `any_later`, of several flags in one collective."""
        if self._world_size == 1:
            return lambda: [*flags]
        if (exchange := exchange_of()) is not None:
            return exchange.any_of_later(flags)
        votes = torch.tensor(flags, dtype=torch.int32)
        work = dist.all_reduce(votes, op=dist.ReduceOp.MAX, async_op=True)
        assert work is not None

        def answer() -> list[bool]:
            work.wait()
            return votes.bool().tolist()

        return answer
