"""The mean of the ranks' tensors, each rank weighted by its samples."""

from collections.abc import Sequence

import torch
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from runner.distributed.collectives import max_over
from runner.distributed.world import World


@torch.no_grad()
def average_in_place(tensors: Sequence[torch.Tensor], num_samples: int, world: World) -> None:
    """Give all ranks the mean; of counts, such as of batches seen, the largest. All ranks must call it."""
    if world.world_size == 1 or not tensors:
        return
    samples = world.collectives.sum(torch.tensor(float(num_samples), dtype=torch.float64, device=tensors[0].device))
    weight = num_samples / samples.item()
    for dtype in dict.fromkeys(t.dtype for t in tensors if t.is_floating_point()):
        alike = [t for t in tensors if t.dtype == dtype]
        flat = world.collectives.sum(_flatten_dense_tensors(alike) * weight)
        for tensor, average in zip(alike, _unflatten_dense_tensors(flat, alike), strict=True):
            tensor.copy_(average)
    for tensor in tensors:
        if not tensor.is_floating_point():
            max_over(None, tensor)
