"""Gradients combined by hand: what DDP does, in the few lines that it takes without overlap."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from runner.config import Config
from runner.parallel.protocol import Axes, Recipe
from runner.parallel.replica import Replica
from runner.world import World


class AllReduce:
    """parallel=allreduce: one all_reduce of one flattened buffer after the last backward of a step.

    One buffer rather than a call per parameter: 3.5 ms against 37 ms for 60 tensors of 10,000 floats on 2 gloo ranks.
    """

    needs_group = False

    def __init__(self) -> None:
        pass

    def axes(self, world_size: int) -> Axes:
        return Axes(replicate=world_size)

    def check(self, config: Config, module: nn.Module) -> list[str]:
        return []

    def prepare(self, recipe: Recipe, world: World) -> Replica:
        for tensor in (*recipe.module.parameters(), *recipe.module.buffers()):
            if world.world_size > 1:
                dist.broadcast(tensor.data, src=0)

        def reduce(parameters: Iterable[nn.Parameter]) -> None:
            # Every rank must flatten the same parameters: one that this rank did not use counts as zero.
            gradients = [p.grad if p.grad is not None else torch.zeros_like(p) for p in trained]
            flat = world.sum(_flatten_dense_tensors(gradients))
            for parameter, gradient in zip(trained, _unflatten_dense_tensors(flat, gradients), strict=True):
                parameter.grad = gradient

        trained = [p for p in recipe.module.parameters() if p.requires_grad]
        optimizer = recipe.make_optimizer(recipe.module.parameters())
        return Replica(recipe.module, optimizer, recipe.loss, recipe.precision, recipe.clip_grad_norm, reduce=reduce)
