"""The function `batch_norm` over the batches of all ranks, on any device, as a function that autograd can use."""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn.modules import _functions

from runner.distributed.collectives import gather_over, sum_over
from runner.tensor_values import has_values


def batch_norm_over(
    group: dist.ProcessGroup | None,
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    momentum: float,
    eps: float,
) -> Tensor:  # (N, C, ...) -> (N, C, ...)
    """Normalize by the statistics of the samples of all ranks of the group, and update the running statistics.

    All ranks must call it, also with an empty batch: forward gathers once, and backward sums once. Output, input
    gradient and running statistics are those of `F.batch_norm` on the concatenated batch. Gradients of weight and bias
    are this rank's term of their sum, which DDP or an all_reduce computes. Raises ValueError on all ranks if the whole
    batch has one value per channel, as `F.batch_norm` does.
    """
    if input.device.type in ("cuda", "xpu"):  # torch's function rejects CPU tensors
        ranks = group or dist.group.WORLD
        arguments = (input, weight, bias, running_mean, running_var, eps, momentum, ranks, dist.get_world_size(ranks))
        output: Tensor = _functions.SyncBatchNorm.apply(*arguments)
        return output
    count, mean, var = _gather_statistics(input.detach(), group)
    if count == 1:
        size = torch.Size([1, *input.shape[1:]])
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {size}")
    if count > 0:  # an empty batch keeps the running statistics
        _track(running_mean, mean, momentum)
        _track(running_var, var * (count / (count - 1)), momentum)
    dtype = _statistics_dtype(input)
    weight, bias = (None if parameter is None else parameter.to(dtype) for parameter in (weight, bias))
    normalized: Tensor = _Normalize.apply(input, weight, bias, mean.to(dtype), var.to(dtype), count, eps, group)
    return normalized


@torch.no_grad()
def _track(running: Tensor | None, value: Tensor, momentum: float) -> None:
    if running is not None:
        running.lerp_(value.to(running.dtype), momentum)


class _Normalize(torch.autograd.Function):
    """Normalization by a mean and variance that are functions of all ranks' inputs.

    Ioffe, Szegedy, "Batch Normalization", 2015: with y = weight * x_hat + bias and the sums over all `count` values,
    dx = weight / std * (dy - sum(dy) / count - x_hat * sum(dy * x_hat) / count). All terms but the one in dy are a
    batch norm of x with another weight and bias.
    """

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,  # (N, C, ...)
        weight: Tensor | None,  # (C)
        bias: Tensor | None,
        mean: Tensor,
        var: Tensor,
        count: int,
        eps: float,
        group: dist.ProcessGroup | None,
    ) -> Tensor:
        ctx.save_for_backward(input, weight, mean, var)
        ctx.count, ctx.eps, ctx.group = count, eps, group
        return F.batch_norm(input, mean, var, weight, bias, training=False, eps=eps)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        """All ranks must call it, unless no rank's input requires a gradient."""
        input, weight, mean, var = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True
            return *_differentiable_gradients(ctx, input, weight, grad_output), *[None] * 5
        needs_input, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        if grad_output.stride() != input.stride():
            # The kernel is 8 times slower if only one of them is channels_last.
            grad_output = torch.empty_like(input).copy_(grad_output)
        if input.numel() > 0:
            # In evaluation mode these sums per channel are the gradients of weight and bias.
            _, grad_weight, grad_bias = torch.ops.aten.native_batch_norm_backward(
                grad_output, input, weight, mean, var, None, None, False, ctx.eps, [False, True, True]
            )
        else:  # the kernel divides by zero here
            grad_weight, grad_bias = torch.zeros_like(mean), torch.zeros_like(mean)
        grad_input = None
        if needs_input:
            sums = torch.stack([grad_weight, grad_bias]).double()  # (2, C): sum(dy * x_hat), sum(dy)
            sum_over(ctx.group, sums)
            scale = (var + ctx.eps).rsqrt() * (1 if weight is None else weight)
            weight_hat, bias_hat = (sums * scale / -ctx.count).to(mean.dtype)
            grad_input = F.batch_norm(input, mean, var, weight_hat, bias_hat, training=False, eps=ctx.eps)
            # In bfloat16 the scale is rounded too, as autocast rounds a convolution's weight. A float32 scale takes
            # 3 times as long.
            scale = scale.to(grad_input.dtype).view(-1, *[1] * (input.dim() - 2))  # (C, 1, ...)
            grad_input.addcmul_(grad_output, scale)
        return (
            grad_input,
            grad_weight if needs_weight else None,
            grad_bias if needs_bias else None,
            *[None] * 5,
        )


class _Total(torch.autograd.Function):
    """The sum over the ranks of the group, which can be differentiated any number of times."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        ctx.group, total = group, tensor.clone()
        sum_over(group, total)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _Total.apply(gradient, ctx.group), None


def _differentiable_gradients(
    ctx: Any, input: Tensor, weight: Tensor | None, grad_output: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of input, weight and bias by operators that autograd records."""
    dims, shape = [0, *range(2, input.dim())], [1, -1, *[1] * (input.dim() - 2)]
    x, dy = input.to(_statistics_dtype(input)), grad_output.to(_statistics_dtype(input))

    def mean_over_ranks(tensor: Tensor) -> Tensor:  # (N, C, ...) -> (1, C, 1, ...)
        total: Tensor = _Total.apply(tensor.sum(dims), ctx.group)
        return total.div(ctx.count).view(shape)

    centered = x - mean_over_ranks(x)
    scale = (mean_over_ranks(centered**2) + ctx.eps).rsqrt()
    x_hat = centered * scale
    grad_input = (dy - mean_over_ranks(dy) - x_hat * mean_over_ranks(dy * x_hat)) * scale
    grad_input = grad_input if weight is None else grad_input * weight.view(shape)
    return grad_input.to(input.dtype), (dy * x_hat).sum(dims), dy.sum(dims)


def _statistics_dtype(input: Tensor) -> torch.dtype:
    return torch.promote_types(input.dtype, torch.float32)


def _gather_statistics(input: Tensor, group: dist.ProcessGroup | None) -> tuple[int, Tensor, Tensor]:
    """Return count, mean and biased variance per channel over all ranks.  (N, C, ...) -> N, (C), (C)

    The results are identical to the bit on all ranks. All ranks must call it.
    """
    num_channels = input.size(1)
    packed = input.new_zeros(1 + 2 * num_channels, dtype=torch.float64)  # an empty batch has count 0
    if input.numel() > 0:
        count, mean, var = _statistics(input)
        packed = torch.cat([count.view(1), mean, var])
    counts, means, variances = gather_over(group, packed).split([1, num_channels, num_channels], dim=1)
    count, mean, var = _merge(counts.squeeze(1), means, variances)
    if not has_values(count):
        return input.numel() // num_channels * dist.get_world_size(group), mean, var
    return int(count), mean, var


def _statistics(input: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return count, mean and biased variance per channel, in float64.  (N, C, ...) -> (), (C), (C)

    If channels are innermost, ATen's kernel sums in float32: over 78,400 values of standard deviation 1 its variance
    is off by 2e-5, and at a mean of 1e4 by 26. Therefore each column of pixels is a separate channel for the kernel.
    That takes no longer, and the merged variance is off by 3e-7 and 2e-4.
    """
    num_channels, count = input.size(1), input.numel() // input.size(1)
    num_parts = input.size(-1) if input.dim() > 2 and input.stride(1) == 1 else 1
    if num_parts > 1:
        input = input.movedim(1, -1).reshape(-1, num_parts * num_channels)  # (N, C, ..., W) -> (N * ..., W * C)
    # The results have the dtype of the given running statistics, which momentum 0 does not change.
    scratch = input.new_zeros(input.size(1), dtype=_statistics_dtype(input))
    moments = torch.stack(torch.batch_norm_update_stats(input, scratch, scratch, momentum=0.0)).double()
    means, variances = moments.view(2, num_parts, num_channels)
    return _merge(means.new_full((num_parts,), count / num_parts), means, variances)


def _merge(counts: Tensor, means: Tensor, variances: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return count, mean and biased variance of the union of P parts.  (P), (P, C), (P, C) -> (), (C), (C)

    Chan, Golub, LeVeque, "Updating Formulae and a Pairwise Algorithm for Computing Sample Variances", 1979: unlike
    a sum of squares it stays exact if the mean is large compared with the deviation.
    """
    count = counts.sum()
    fractions = (counts / count.clamp(min=1)).unsqueeze(1)  # (P, 1)
    mean = (fractions * means).sum(0)
    return count, mean, (fractions * (variances + (means - mean) ** 2)).sum(0)
