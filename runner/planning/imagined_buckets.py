"""The buckets of DistributedDataParallel in a plan, in place of runner.parallel.ddp.FixedBuckets."""

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._utils import _unflatten_dense_tensors

from runner.distributed.collectives import sum_over
from runner.errors import InputError
from runner.parallel.ddp import BROADCAST


class ImaginedBuckets(nn.Module):
    """Fills and sums the buckets that DistributedDataParallel would, whose reducer in C++ needs tensors with values."""

    def __init__(
        self,
        module: nn.Module,
        bucket_cap_mb: float = 25,
        gradient_as_bucket_view: bool = True,
        **options: Any,
    ):
        super().__init__()
        self.module, self._is_view = module, gradient_as_bucket_view
        self._sent = [*module.buffers()] if options.get(BROADCAST, True) else []
        in_reverse = [*module.parameters()][::-1]
        trained: list[torch.Tensor] = [parameter for parameter in in_reverse if parameter.requires_grad]
        limits = [dist._DEFAULT_FIRST_BUCKET_BYTES, int(bucket_cap_mb * 2**20)]
        numbers, _ = dist._compute_bucket_assignment_by_size(trained, limits)
        self._buckets: list[torch.Tensor] = []
        self._views: dict[torch.Tensor, torch.Tensor] = {}
        for bucket in ([trained[number] for number in bucket] for bucket in numbers):
            self._buckets.append(flat := bucket[0].new_empty(sum(parameter.numel() for parameter in bucket)))
            self._views |= zip(bucket, _unflatten_dense_tensors(flat, bucket), strict=True)
        for parameter in trained:
            parameter.register_post_accumulate_grad_hook(self._fill)

    def forward(self, *args: Any) -> Any:
        if self._sent and torch.is_grad_enabled():
            assert dist.group.WORLD is not None
            dist._broadcast_coalesced(dist.group.WORLD, self._sent, 250 * 2**20, 0)
        return self.module(*args)

    def _fill(self, parameter: torch.Tensor) -> None:
        view, gradient = self._views[parameter], parameter.grad
        assert gradient is not None
        if gradient is not view:
            view.copy_(gradient)
        if self._is_view:
            parameter.grad = view

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context in which nothing is summed; gradients are summed by `check_gradients` only."""
        return nullcontext()

    def register_comm_hook(self, state: object, hook: object) -> None:
        raise InputError("parallel.comm_hook compresses gradients by their values; it can be planned only with none")

    def sum_on_cpu(self) -> bool:
        return True

    def check_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Sum the buckets. Called after the last backward of a step."""
        for flat in self._buckets:
            sum_over(None, flat)
