"""DistributedDataParallel: a replica per rank; gradients are averaged bucket by bucket while backward runs."""

import inspect
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from runner.config.schema import Config
from runner.distributed.local_exchange import exchange_of
from runner.distributed.sync_batch_norm import keeps_all_buffers
from runner.distributed.world import World
from runner.parallel.buckets import FixedBuckets
from runner.parallel.powersgd import PowerSGD
from runner.parallel.replica import Replica
from runner.parallel.turns import take_turns
from runner.training.objective import Turn, Within
from runner.training.strategy import Axes, Carries, Recipe, Spread


class DDP:
    """parallel=ddp; the options are DistributedDataParallel's, and what its gradients are compressed by on their way.

    With a comm_hook the numbers are no longer those of parallel=none.
    """

    needs_group = True
    meta_init = False
    spans_devices = True
    carries: Carries = "several_losses"
    fails_at_once = True

    def __init__(
        self,
        bucket_cap_mb: float = 25,
        find_unused_parameters: bool = False,
        static_graph: bool = False,
        gradient_as_bucket_view: bool = True,
        broadcast_buffers: bool = True,
        comm_hook: Literal["none", "fp16", "bf16", "powersgd"] = "none",
        powersgd_rank: int = 1,
    ):
        if bucket_cap_mb <= 0:
            raise ValueError(f"parallel.bucket_cap_mb={bucket_cap_mb} must be above 0; try 25")
        if powersgd_rank < 1:
            raise ValueError(f"powersgd_rank={powersgd_rank} must be at least 1; try 1")
        if powersgd_rank != 1 and comm_hook != "powersgd":
            raise ValueError(f"powersgd_rank={powersgd_rank} has no effect; try parallel.comm_hook=powersgd with it")
        self.static_graph, self.comm_hook, self.powersgd_rank = static_graph, comm_hook, powersgd_rank
        # torch 2.15 deprecates the old name.
        known = inspect.signature(DistributedDataParallel).parameters
        self._broadcast = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
        self.options: dict[str, Any] = {
            "bucket_cap_mb": bucket_cap_mb,
            "find_unused_parameters": find_unused_parameters,
            "static_graph": static_graph,
            "gradient_as_bucket_view": gradient_as_bucket_view,
            self._broadcast: broadcast_buffers,
        }

    def axes(self, world_size: int) -> Axes:
        return Axes(replicate=world_size)

    def check(self, config: Config, module: nn.Module) -> list[str]:
        if self.comm_hook == "powersgd" and config.on_nonfinite == "skip":
            return [
                "on_nonfinite=skip: parallel.comm_hook=powersgd adds what a step left out to the next one, NaN too; "
                "try on_nonfinite=stop"
            ]
        return []

    def prepare(self, recipe: Recipe, world: World) -> Spread:
        return take_turns(recipe, lambda turn: self._spread(recipe, turn, world))

    def _spread(self, recipe: Recipe, turn: Turn, world: World) -> Replica:
        devices = {parameter.device for parameter in recipe.module.parameters()}
        device_ids = [recipe.device] if devices == {recipe.device} and recipe.device.type == "cuda" else None
        # What is the same on all ranks need not be sent: a broadcast of each dtype's buffers in every forward. Other
        # machines may round otherwise.
        is_alike = exchange_of() is not None and keeps_all_buffers(recipe.module)
        alike = {self._broadcast: False} if is_alike else {}
        wrapped = FixedBuckets(Within(recipe.module), device_ids=device_ids, **self.options | alike)
        memory = self._compress(wrapped, world)
        sums = self.comm_hook == "none" and wrapped.sum_on_cpu()
        optimizer = recipe.make_optimizer(turn.parameters)
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
            recipe,
            optimizer,
            turn,
            sum_over=world.collectives.sum,
            within=wrapped,
            loss_scale=1 if sums else world.world_size,  # where DDP averages: the loss is summed over the ranks
            without_sync=without_sync,
            reduce=wrapped.check_gradients,
            memory=memory,
        )

    def _compress(self, wrapped: DistributedDataParallel, world: World) -> PowerSGD | None:
        """Register the hook. Returns what of it has a memory."""
        if self.comm_hook == "fp16":
            wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook)
        elif self.comm_hook == "bf16":
            wrapped.register_comm_hook(None, default_hooks.bf16_compress_hook)
        elif self.comm_hook == "powersgd":
            return PowerSGD(wrapped, self.powersgd_rank, self.options["bucket_cap_mb"], world)
        return None
