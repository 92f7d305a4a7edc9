"""DistributedDataParallel: a replica per rank; gradients are combined bucket by bucket while backward runs."""

import inspect
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from runner.distributed.collectives import sum_over
from runner.distributed.local.exchange import exchange_of
from runner.distributed.sync_batch_norm import keeps_all_buffers
from runner.distributed.world import World
from runner.errors import JobFailed
from runner.objectives.objective import ForwardWrapper, LossGroup
from runner.optimization.parameter_patterns import counted
from runner.parallel.loss_groups import prepare_loss_groups
from runner.parallel.replica import Replica
from runner.training.mode import Parallel, ParallelModel, Recipe
from runner.training.refusal import Refusal

# torch 2.15 renames the option and deprecates the old name.
_PARAMETERS = inspect.signature(DistributedDataParallel).parameters
BROADCAST = "forward_sync_buffers" if "forward_sync_buffers" in _PARAMETERS else "broadcast_buffers"


class DDP(Parallel):
    """parallel=ddp; the options are DistributedDataParallel's, and how gradients are compressed for communication."""

    needs_group = True
    spans_devices = True
    supported_objectives = "several_losses"
    is_elastic = True
    refusals = (
        Refusal("replay_every_steps", "{setting} needs parallel.static_graph=false", given="static_graph=true"),
    )

    def __init__(
        self,
        bucket_cap_mb: float = 25,
        find_unused_parameters: bool = False,
        static_graph: bool = False,
        gradient_as_bucket_view: bool = True,
        broadcast_buffers: bool = True,
        comm_hook: Literal["none", "fp16", "bf16"] = "none",
    ):
        if bucket_cap_mb <= 0:
            raise ValueError(f"parallel.bucket_cap_mb={bucket_cap_mb} must be above 0; try 25")
        self.needs_all_gradients = not (find_unused_parameters or static_graph)
        self.static_graph, self.comm_hook = static_graph, comm_hook
        self.options: dict[str, Any] = {
            "bucket_cap_mb": bucket_cap_mb,
            "find_unused_parameters": find_unused_parameters,
            "static_graph": static_graph,
            "gradient_as_bucket_view": gradient_as_bucket_view,
            BROADCAST: broadcast_buffers,
        }

    def prepare(self, recipe: Recipe, world: World) -> ParallelModel:
        return prepare_loss_groups(recipe, lambda loss_group: self._prepare_group(recipe, loss_group, world))

    def _prepare_group(self, recipe: Recipe, loss_group: LossGroup, world: World) -> Replica:
        wrapped = wrap(recipe, world, **self.options)
        hooks = {"fp16": default_hooks.fp16_compress_hook, "bf16": default_hooks.bf16_compress_hook}
        if self.comm_hook in hooks:
            wrapped.register_comm_hook(None, hooks[self.comm_hook])
        is_summed = self.comm_hook == "none" and wrapped.sum_on_cpu()
        # A static graph is recorded in the first backward, which must synchronize. Averaging there as well changes
        # nothing: gradients that are averaged twice are equal on all ranks the second time.
        first_backward: list[AbstractContextManager[Any]] = [nullcontext()] if self.static_graph else []
        options = bucket_options(wrapped, world, is_summed)
        options["without_sync"] = lambda: first_backward.pop() if first_backward else wrapped.no_sync()
        return Replica(recipe, recipe.make_optimizer(loss_group.parameters), loss_group, **options)


class FixedBuckets(DistributedDataParallel):
    """DistributedDataParallel whose gradients are in the same buckets in every step, including the first one.

    It averages gradients while backward runs, unless `sum_on_cpu` returns True. All ranks must construct it together.

    DistributedDataParallel rebuilds its buckets after a process's first step, in the order in which gradients became
    ready. The order in which an all-reduce sums depends on the position in a bucket (in gloo's ring of three ranks or
    more, each chunk begins at another rank), so that the first step after a resume would round differently. This class
    builds the final buckets at once, from the parameters in reverse order of registration. If a model registers its
    layers in another order than that of their use, communication and backward overlap less.

    It calls what DistributedDataParallel calls after its first step (torch/csrc/distributed/c10d/reducer.cpp:
    push_rebuilt_params_for_all_indices, rebuild_buckets); calling that again has no effect.
    """

    def __init__(self, module: nn.Module, **options: Any):
        super().__init__(module, **options)
        self.reducer._push_all_rebuilt_params()
        self.reducer._rebuild_buckets()  # with find_unused_parameters, torch itself builds final buckets at once

    def sum_on_cpu(self) -> bool:
        """Sum gradients instead of averaging them, if the ranks compute on CPUs. Return True if they do.

        All buckets are summed when the last gradient is ready: if all cores are busy, overlapping is no faster, and
        ranks wait for each other only once. Static graphs are averaged, because in their first step no bucket is marked
        as the last one. All ranks must call it.
        """
        if self.device_type != "cpu" or self.static_graph:
            return False
        self.register_comm_hook([], _sum_after_last)
        return True

    def check_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Raise JobFailed if the step's last backward left a bucket incomplete.

        torch does not sum a bucket that lacks a gradient, and reports that only in the next forward.
        """
        if self.find_unused_parameters or self.static_graph:
            return
        try:
            self._check_reducer_finalized()
        except RuntimeError:
            without = {parameter for parameter in parameters if parameter.requires_grad and parameter.grad is None}
            named = self.module.named_parameters()
            names = [name.removeprefix("model.") for name, parameter in named if parameter in without]
            # Without a name, the gradients exist, but some are only from earlier micro-batches.
            raise JobFailed(
                f"the loss of a step's last micro-batch does not depend on {counted(names, 2) or 'all parameters'}, "
                "but parallel=ddp and zero wait for all gradients; try parallel.find_unused_parameters=true"
            ) from None

    def _build_params_for_reducer(self) -> tuple[list[nn.Parameter], list[bool]]:
        """Return the trained parameters in the order of buckets, and whether the gradient of each is sparse."""
        parameters, sparse = super()._build_params_for_reducer()
        return (parameters, sparse) if self.find_unused_parameters else (parameters[::-1], sparse[::-1])


def wrap(recipe: Recipe, world: World, **options: Any) -> FixedBuckets:
    """Wrap the recipe's model. All ranks must call it."""
    # Buffers that are equal on all ranks anyway need no broadcast in every forward. On several machines, rounding may
    # differ.
    if world.world_size == 1 or (exchange_of() is not None and keeps_all_buffers(recipe.module)):
        options[BROADCAST] = False
    devices = {parameter.device for parameter in recipe.module.parameters()}
    device_ids = [recipe.device] if devices == {recipe.device} and recipe.device.type == "cuda" else None
    return FixedBuckets(ForwardWrapper(recipe.module), device_ids=device_ids, **options)


def bucket_options(wrapped: FixedBuckets, world: World, is_summed: bool) -> dict[str, Any]:
    """Return the options of Replica for a wrapped model. is_summed: gradients are summed instead of averaged."""
    return {
        "sum_over": world.collectives.sum,
        "wrapper": wrapped,
        "loss_scale": 1 if is_summed else world.world_size,  # the loss is summed over ranks
        "reduce": wrapped.check_gradients,
    }


Summed = torch.futures.Future[torch.Tensor]


def _sum_after_last(waiting: list[tuple[torch.Tensor, Summed]], bucket: dist.GradBucket) -> Summed:
    """Collect a backward's buckets, and sum them all when the last one is ready; a communication hook."""
    waiting.append((bucket.buffer(), summed := Summed()))
    if bucket.is_last():
        for gradients, future in waiting:
            sum_over(None, gradients)
            future.set_result(gradients)
        waiting.clear()
    return summed
