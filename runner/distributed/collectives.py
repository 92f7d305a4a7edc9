"""Collectives of a training step: sums, gathered rows with gradients, and the logical or of flags."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from runner.distributed.local.exchange import exchange_of, is_plain, is_small

# torch 2.14 renamed these two functions and deprecated the old names.
all_gather_single: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def sum_over(group: dist.ProcessGroup | None, tensor: torch.Tensor) -> None:
    """Sum the tensor over the group's ranks, or over all ranks, in place. All of them must call it.

    Small CPU tensors are summed in the order of the ranks, large ones in that of gloo, on one machine or several.
    """
    exchange = exchange_of(group)
    if is_small(tensor, dist.get_world_size(group)):
        gathered = gather_over(group, tensor) if exchange is None else exchange.gather(tensor, "all_reduce")
        first, *others = gathered
        for other in others:
            first += other
        tensor.detach().copy_(first)
    elif exchange is not None and is_plain(tensor):
        exchange.sum_large(tensor)
    else:
        dist.all_reduce(tensor, group=group)


def max_over(group: dist.ProcessGroup | None, tensor: torch.Tensor) -> None:
    """Take the maximum over the group's ranks, or over all ranks, in place. All of them must call it."""
    tensor.copy_(gather_over(group, tensor).amax(0))


def gather_over(group: dist.ProcessGroup | None, tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensors of the group's ranks, in their order.  (...) -> (N, ...)  All of them must call it."""
    exchange, num_ranks = exchange_of(group), dist.get_world_size(group)
    if exchange is not None and is_small(tensor, num_ranks):
        return exchange.gather(tensor)
    gathered = tensor.new_empty(num_ranks, *tensor.shape)
    all_gather_single(gathered.view(-1), tensor.reshape(-1), group=group)  # gloo accepts only these shapes
    return gathered


@dataclass(frozen=True)
class GatheredRows:
    """The rows of all ranks, (sum of n, ...), in the order of the ranks; unpacks as (rows, first)."""

    rows: torch.Tensor
    first: int  # the index of this rank's first row
    counted: int  # the number of rows of all ranks; on a rank without samples, rows that do not count follow them

    def __iter__(self) -> Iterator[Any]:
        return iter((self.rows, self.first))


def gather_rows(rows: torch.Tensor, are_counted: bool) -> GatheredRows:
    """Gather the rows of all ranks, of which this rank has (n, ...). All ranks must call it, and its backward.

    Without a process group, such as in a dry run, the result is this rank's rows.

    n may differ between the ranks; all other dims and the dtype must be equal. Backward sums the gradients of all
    ranks, and returns those of this rank's rows. With `are_counted=False`, this rank's rows are not sent to the other
    ranks; they are appended to its own result, and their gradient is zero.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return GatheredRows(rows, 0, len(rows))
    gathered, first, counted = _Gather.apply(rows, are_counted)  # type: ignore[no-untyped-call]
    return GatheredRows(gathered, first, counted)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, are_counted: bool) -> tuple[torch.Tensor, int, int]:
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
    def backward(ctx: Any, gradient: torch.Tensor, *_: Any) -> tuple[torch.Tensor, None]:
        total = gradient.new_zeros(ctx.total, *gradient.shape[1:])  # contiguous, as NCCL requires
        if ctx.are_counted:
            total.copy_(gradient[: ctx.total])
        sum_over(None, total)
        return total[ctx.local] if ctx.are_counted else torch.zeros_like(gradient[ctx.local]), None


class Collectives:
    """Collectives over all ranks, which must all call each method. A world of one rank needs no process group."""

    def __init__(self, world_size: int):
        self._world_size = world_size

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor after summing it over all ranks in place."""
        if self._world_size > 1:
            sum_over(None, tensor)
        return tensor

    def gather(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the rows of all ranks, in order: (n, ...) -> (sum of n, ...). Other dims and dtypes must be equal."""
        if self._world_size == 1:
            return rows
        gathered: list[torch.Tensor] = [rows] * self._world_size
        dist.all_gather_object(gathered, rows.cpu())
        return torch.cat(gathered).to(rows.device)

    def gather_objects(self, value: Any) -> list[Any] | None:
        """Return the values of all ranks, in their order, on rank 0; None on the others."""
        if self._world_size == 1:
            return [value]
        gathered: list[Any] | None = [None] * self._world_size if dist.get_rank() == 0 else None
        dist.gather_object(value, gathered, dst=0)
        return gathered

    def any_async(self, flag: bool) -> Callable[[], bool]:
        """Return a function that returns True if the flag is set on any rank. No rank waits for its device."""
        results = self.any_of_async(flag)
        return lambda: results()[0]

    def any_of_async(self, *flags: bool) -> Callable[[], list[bool]]:
        """Return a function that returns for each flag if it is set on any rank, as `any_async` does for one flag."""
        if self._world_size == 1:
            return lambda: [*flags]
        if (exchange := exchange_of()) is not None:
            return exchange.any_of_async(flags)
        votes = torch.tensor(flags, dtype=torch.int32)
        work = dist.all_reduce(votes, op=dist.ReduceOp.MAX, async_op=True)
        assert work is not None

        def result() -> list[bool]:
            work.wait()
            return votes.bool().tolist()

        return result
