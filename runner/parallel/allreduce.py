"""Gradients combined by hand: what DDP does, in the few lines that it takes without overlap."""

from collections.abc import Iterable

import torch.distributed as dist
from torch import nn

from runner.config.schema import Config
from runner.distributed.world import World
from runner.parallel.gradient_sum import sum_gradients
from runner.parallel.replica import Replica
from runner.parallel.turns import take_turns
from runner.training.objective import Turn
from runner.training.strategy import Axes, Carries, Recipe, Spread


class AllReduce:
    """parallel=allreduce: one all_reduce of one flattened buffer after the last backward of a step."""

    needs_group = False
    meta_init = False
    spans_devices = False
    carries: Carries = "several_losses"
    fails_at_once = True

    def axes(self, world_size: int) -> Axes:
        return Axes(replicate=world_size)

    def check(self, config: Config, module: nn.Module) -> list[str]:
        return []

    def prepare(self, recipe: Recipe, world: World) -> Spread:
        for tensor in (*recipe.module.parameters(), *recipe.module.buffers()):
            if world.world_size > 1:
                dist.broadcast(tensor.data, src=0)

        def reduce(parameters: Iterable[nn.Parameter]) -> None:
            sum_gradients(parameters, world.collectives.sum)

        def spread(turn: Turn) -> Replica:
            optimizer = recipe.make_optimizer(turn.parameters)
            return Replica(recipe, optimizer, turn, sum_over=world.collectives.sum, reduce=reduce)

        return take_turns(recipe, spread)
