"""The gradients of several ranks added up by hand, in one collective over one flat buffer."""

from collections.abc import Callable, Iterable

import torch
from torch import nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.distributed.tensor import DTensor


def sum_gradients(parameters: Iterable[nn.Parameter], sum_over: Callable[[torch.Tensor], object]) -> None:
    """Replace each gradient by its sum over ranks that hold the same parameters, or the same slices of them.

    sum_over: sums a tensor over those ranks in place; all of them must call this. One buffer rather than a call per
    parameter: 3.5 ms against 37 ms for 60 tensors of 10,000 floats on 2 gloo ranks.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    # Every rank must flatten the same parameters: one that this rank did not use counts as zero.
    gradients = [p.grad if p.grad is not None else torch.zeros_like(p) for p in trained]
    local = [g.to_local() if isinstance(g, DTensor) else g for g in gradients]
    flat = _flatten_dense_tensors(local)
    sum_over(flat)
    for parameter, gradient, own, summed in zip(
        trained, gradients, local, _unflatten_dense_tensors(flat, local), strict=True
    ):
        if own is gradient:
            parameter.grad = summed
        else:  # a slice: its gradient knows which
            own.copy_(summed)
            parameter.grad = gradient
