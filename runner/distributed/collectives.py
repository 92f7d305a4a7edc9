"""The collectives of a step: what is summed over all ranks, and the vote. In a world of one each is the identity."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist


class Collectives:
    """Over all ranks of a world, once its process group is formed."""

    def __init__(self, world_size: int):
        self._world_size = world_size

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor summed over all ranks, in place. All ranks must call it."""
        if self._world_size > 1:
            dist.all_reduce(tensor)
        return tensor

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
        if self._world_size == 1:
            return lambda: flag
        votes = torch.tensor([int(flag)], dtype=torch.int32)
        work = dist.all_reduce(votes, op=dist.ReduceOp.MAX, async_op=True)
        assert work is not None

        def answer() -> bool:
            work.wait()
            return bool(votes.item())

        return answer
