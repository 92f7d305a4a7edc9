"""DistributedDataParallel whose gradients lie in the same buckets in every step, a process's first one included."""

from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel


class FixedBuckets(DistributedDataParallel):
    """Takes DistributedDataParallel's options. All ranks must make it together.

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

    def _build_params_for_reducer(self) -> tuple[list[nn.Parameter], list[bool]]:
        """The trained parameters, and whether the gradient of each is sparse, in the order that buckets are cut by."""
        parameters, sparse = super()._build_params_for_reducer()
        return (parameters, sparse) if self.find_unused_parameters else (parameters[::-1], sparse[::-1])
