"""DistributedDataParallel whose gradients lie in the same buckets in every step, a process's first one included."""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from runner.distributed.collectives import sum_over
from runner.distributed.local_exchange import exchange_of, is_small
from runner.errors import JobFailed
from runner.training.names import counted

Summed = torch.futures.Future[torch.Tensor]


def _sum_at_once(waiting: list[tuple[torch.Tensor, Summed]], bucket: dist.GradBucket) -> Summed:
    """A hook that keeps a backward's buckets in its state, and sums them when it has the last one."""
    waiting.append((bucket.buffer(), summed := Summed()))
    if bucket.is_last():
        for gradients, of_these in waiting:
            sum_over(None, gradients)
            of_these.set_result(gradients)
        waiting.clear()
    return summed


def _sum_in_background(state: None, bucket: dist.GradBucket) -> Summed:
    """A hook that sums each bucket while backward goes on; a small or sparse one at once, as `sum_over` does."""
    gradients = bucket.buffer()
    if gradients.is_sparse or is_small(gradients, dist.get_world_size()):
        sum_over(None, gradients)
        summed = Summed()
        summed.set_result(gradients)
        return summed
    work = dist.all_reduce(gradients, async_op=True)
    assert work is not None
    return work.get_future().then(lambda future: future.value()[0])


class FixedBuckets(DistributedDataParallel):
    """Takes DistributedDataParallel's options. All ranks must make it together.

    It averages gradients, in the background, unless `sum_on_cpu` is called.

    DistributedDataParallel has one bucket in a process's first step, and cuts that one into buckets in the order in
    which gradients became ready there. An all-reduce sums in an order that depends on the place in the bucket (gloo's
    ring of three ranks or more: each chunk begins at another rank), so that the step after a resume would round
    otherwise than the same step of a run left alone. Here the buckets are cut at once, by the parameters' order of
    registration, last first: gradients become ready so in a model that registers its layers in the order of their use,
    and only how well communication overlaps with backward depends on that.

    It calls what DistributedDataParallel does after its first step (torch/csrc/distributed/c10d/reducer.cpp:
    push_rebuilt_params_for_all_indices, rebuild_buckets), which does nothing once it was done.
    """

    def __init__(self, module: nn.Module, **options: Any):
        super().__init__(module, **options)
        self.reducer._push_all_rebuilt_params()
        self.reducer._rebuild_buckets()  # with find_unused_parameters torch itself cuts them at once, and for good

    def sum_on_cpu(self) -> bool:
        """From now on sum, do not average, where the ranks compute on CPUs. Returns whether they do; all must call it.

        On one machine all buckets at once when the last gradient is there: with all cores busy nothing is faster in
        the background, and ranks wait for each other once. Not with static_graph, in whose first step no bucket knows
        that it is the last one.
        """
        if self.device_type != "cpu" or self.static_graph:
            return False
        if exchange_of() is None:
            self.register_comm_hook(None, _sum_in_background)
        else:
            self.register_comm_hook([], _sum_at_once)
        return True

    def check_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """After a step's last backward: torch sums no bucket that lacks a gradient, and says so in the next forward.

        Raises JobFailed where it is so.
        """
        if self.find_unused_parameters or self.static_graph:
            return
        if without := {parameter for parameter in parameters if parameter.requires_grad and parameter.grad is None}:
            named = self.module.named_parameters()
            names = [name.removeprefix("model.") for name, parameter in named if parameter in without]  # of Within
            raise JobFailed(
                f"the loss of a step does not depend on {counted(names, 2)}, whose gradients are waited for; "
                "try parallel.find_unused_parameters=true"
            )
        try:
            self._check_reducer_finalized()
        except RuntimeError:  # a gradient is there, of another micro-batch
            raise JobFailed(
                "the loss of a step's last micro-batch does not depend on all parameters, and their gradients are "
                "waited for; try parallel.find_unused_parameters=true"
            ) from None

    def _build_params_for_reducer(self) -> tuple[list[nn.Parameter], list[bool]]:
        """The trained parameters, and whether the gradient of each is sparse, in the order that buckets are cut by."""
        parameters, sparse = super()._build_params_for_reducer()
        return (parameters, sparse) if self.find_unused_parameters else (parameters[::-1], sparse[::-1])
