"""The collectives of a step: what is summed over all ranks, and the vote. In a world of one each is the identity."""

from collections.abc import Callable

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
