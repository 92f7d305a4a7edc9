"""DistributedDataParallel: a replica per rank; gradients are averaged bucket by bucket while backward runs."""

import inspect
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from runner.config import Config
from runner.parallel.protocol import Axes, Recipe
from runner.parallel.replica import Replica
from runner.world import World


class DDP:
    """parallel=ddp; the options are DistributedDataParallel's."""

    needs_group = True

    def __init__(
        self,
        bucket_cap_mb: float = 25,
        find_unused_parameters: bool = False,
        static_graph: bool = False,
        gradient_as_bucket_view: bool = True,
        broadcast_buffers: bool = True,
    ):
        if bucket_cap_mb <= 0:
            raise ValueError(f"parallel.bucket_cap_mb={bucket_cap_mb} must be above 0; try 25")
        self.static_graph = static_graph
        # torch 2.15 deprecates the old name.
        known = inspect.signature(DistributedDataParallel).parameters
        broadcast = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
        self.options: dict[str, Any] = {
            "bucket_cap_mb": bucket_cap_mb,
            "find_unused_parameters": find_unused_parameters,
            "static_graph": static_graph,
            "gradient_as_bucket_view": gradient_as_bucket_view,
            broadcast: broadcast_buffers,
        }

    def axes(self, world_size: int) -> Axes:
        return Axes(replicate=world_size)

    def check(self, config: Config, module: nn.Module) -> list[str]:
        return []

    def prepare(self, recipe: Recipe, world: World) -> Replica:
        device_ids = [recipe.device] if recipe.device.type == "cuda" else None
        wrapped = DistributedDataParallel(recipe.module, device_ids=device_ids, **self.options)
        optimizer = recipe.make_optimizer(recipe.module.parameters())
        first_backward = self.static_graph

        def without_sync() -> AbstractContextManager[Any]:
            # A static graph is recorded in the first backward, which must not be without synchronisation. Averaging
            # there once more changes nothing: what is averaged twice is the same on all ranks by then.
            nonlocal first_backward
            if first_backward:
                first_backward = False
                return nullcontext()
            return wrapped.no_sync()

        return Replica(
            recipe.module,
            optimizer,
            recipe.loss,
            recipe.precision,
            recipe.clip_grad_norm,
            forward=wrapped,
            loss_scale=world.world_size,  # DDP averages over the ranks, the loss is summed over them
            without_sync=without_sync,
        )
