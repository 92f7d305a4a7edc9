"""Rows gathered from all ranks, with gradients, for losses that compare the samples of a whole batch."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from runner.distributed.collectives import gather_over, sum_over


@dataclass(frozen=True)
class GatheredRows:
    """The rows of all ranks, (sum of n, ...), in the order of the ranks; unpacks as (rows, first)."""

    rows: Tensor
    first: int  # the index of this rank's first row
    counted: int  # the number of rows of all ranks; on a rank without samples, rows that do not count follow them

    def __iter__(self) -> Iterator[Any]:
        return iter((self.rows, self.first))


def gather_rows(rows: Tensor, are_counted: bool) -> GatheredRows:
    """Gather the rows of all ranks, of which this rank has (n, ...). All ranks must call it, and its backward.

    n may differ between the ranks; all other dims and the dtype must be equal. Backward sums the gradients of all
    ranks, and returns those of this rank's rows. With `are_counted=False`, this rank's rows are not sent to the other
    ranks; they are appended to its own result, and their gradient is zero.
    """
    gathered, first, counted = _Gather.apply(rows, are_counted)  # type: ignore[no-untyped-call]
    return GatheredRows(gathered, first, counted)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, are_counted: bool) -> tuple[Tensor, int, int]:
        local = rows if are_counted else rows[:0]
        sizes = gather_over(None, torch.tensor([len(local)], device=rows.device)).flatten().tolist()
        padded = local.new_zeros(max(sizes), *rows.shape[1:])
        padded[: len(local)] = local
        parts = [part[:size] for part, size in zip(gather_over(None, padded), sizes, strict=True)]
        ctx.are_counted, ctx.total = are_counted, sum(sizes)
        first = sum(sizes[: dist.get_rank()]) if are_counted else ctx.total
        ctx.local = slice(first, first + len(rows))
        return torch.cat([*parts, *([] if are_counted else [rows])]), first, ctx.total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, *_: Any) -> tuple[Tensor, None]:
        total = gradient.new_zeros(ctx.total, *gradient.shape[1:])  # contiguous, as NCCL requires
        if ctx.are_counted:
            total.copy_(gradient[: ctx.total])
        sum_over(None, total)
        return total[ctx.local] if ctx.are_counted else torch.zeros_like(gradient[ctx.local]), None
