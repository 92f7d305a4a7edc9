"""The axis sequence of a mesh: its ranks compute different positions of the same samples."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from runner.distributed.collectives import gather_over, reduce_scatter_single
from runner.distributed.process_group import make_mesh
from runner.distributed.world import World
from runner.errors import as_input_error
from runner.input.batch import MicroBatch, StepBatch
from runner.objectives.objective import Prediction
from runner.parallel.fsdp import data_options, shard
from runner.parallel.replica import Replica
from runner.training.mode import Axes, Recipe
from runner.training.model.positions import LocalAttention, of_positions, run_stages, split_positions


def prepare_positions(recipe: Recipe, world: World, axes: Axes) -> Replica:
    """Prepare the model over the axes replicate, shard and sequence. All ranks must call it.

    Each position of a sample counts as data: the gradients are summed over all ranks, and if parameters are sharded,
    each shard is divided among the ranks along sequence.
    """
    sequence = make_mesh(world.device, data=axes.data_ranks, sequence=axes.sequence)["sequence"]
    if axes.shard > 1:
        sizes = {"replicate": axes.replicate, "shard": axes.shard * axes.sequence}
    else:
        sizes = {"replicate": axes.replicate * axes.sequence}
    mesh = make_mesh(world.device, **{axis: size for axis, size in sizes.items() if size > 1})
    options = data_options(mesh, lambda data: shard(recipe, data))
    optimizer = recipe.make_optimizer(recipe.module.parameters())
    return PositionsReplica(recipe, optimizer, sequence.get_group(), sum_over=world.collectives.sum, **options)


class PositionsReplica(Replica):
    """A replica that computes some of the positions of its samples.

    group: the ranks that compute the other positions of the same samples. The other arguments are those of Replica.
    """

    def __init__(
        self,
        recipe: Recipe,
        optimizer: torch.optim.Optimizer,
        group: dist.ProcessGroup,
        *,
        wrapper: Callable[..., Any] | None = None,
        evaluation_wrapper: Callable[..., Any] | None = None,
        **options: Any,
    ):
        self._group, self._stages = group, recipe.module.stages()  # type: ignore[operator]
        self._attention = LocalAttention(self._gather)
        options |= {"wrapper": self._locally(wrapper), "evaluation_wrapper": self._locally(evaluation_wrapper)}
        super().__init__(recipe, optimizer, **options)

    def forward_backward(self, batch: StepBatch) -> Tensor:
        with self._attention:  # also in backward, because the model may call torch.utils.checkpoint
            return super().forward_backward(batch)

    def predict(self, micro_batch: MicroBatch) -> Prediction | None:
        """Return the losses, outputs and targets of the local positions. All ranks must call it."""
        with self._attention:
            return super().predict(micro_batch)

    def _locally(self, wrapper: Callable[..., Any] | None) -> Callable[..., Any]:
        """Return a wrapper of functions of a model and a micro-batch, which get the local positions."""

        def call(function: Callable[..., Any], *args: Any) -> Any:
            *others, micro_batch = args
            with as_input_error():  # a batch may be shorter than the samples of the dry run
                self._slices = split_positions(micro_batch.targets.size(1), self._group.size())
            positions = self._draws.positions = self._slices[dist.get_rank(self._group)]

            def model(inputs: Any) -> Tensor:
                return run_stages(self._stages, inputs, self._attention, positions)

            arguments = (*others, of_positions(micro_batch, positions))
            return (wrapper or self._call)(lambda _, *rest: function(model, *rest), *arguments)

        return call

    def _gather(self, local: Tensor) -> Tensor:  # (N, H, L, D) -> (N, H, T, D)
        lengths = [len(positions) for positions in self._slices]
        whole: Tensor = _Gather.apply(local, lengths, self._group)  # type: ignore[no-untyped-call]
        return whole


class _Gather(torch.autograd.Function):
    """Gathers the positions of all ranks of the group; backward sums their gradients. All of them must call both."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, lengths: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.lengths, ctx.group = lengths, group
        parts = gather_over(group, _pad(local, max(lengths)))  # (ranks, N, H, longest L, D)
        return torch.cat([part[..., :length, :] for part, length in zip(parts, lengths, strict=True)], -2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        longest = max(ctx.lengths)
        parts = torch.stack([_pad(part, longest) for part in gradient.split(ctx.lengths, -2)])
        local = torch.empty_like(parts[0])
        reduce_scatter_single(local.view(-1), parts.view(-1), group=ctx.group)
        return local[..., : ctx.lengths[dist.get_rank(ctx.group)], :], None, None


def _pad(part: Tensor, length: int) -> Tensor:
    return F.pad(part, (0, 0, 0, length - part.size(-2)))
