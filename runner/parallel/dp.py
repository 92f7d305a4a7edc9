"""DataParallel: one process splits each batch over its GPUs, and gathers outputs and gradients on the first."""

import logging
from collections.abc import Sequence

import torch
from torch import nn

from runner.distributed.world import World
from runner.parallel.replica import Replica
from runner.training.mode import Axes, Parallel, Recipe
from runner.training.refusal import Refusal

log = logging.getLogger(__name__)


class DP(Parallel):
    """parallel=dp."""

    supported_objectives = "supervised"  # DataParallel splits the inputs of a forward over the GPUs
    refusals: Sequence[Refusal] = (
        Refusal(
            "sync_batchnorm",
            "{setting}: parallel=dp normalizes the samples of each GPU separately",
            "try parallel=ddp",
            values=(True,),
        ),
    )

    def __init__(self) -> None:
        if torch.cuda.device_count() <= 1:
            self.refusals = ()  # the model sees the whole batch

    def axes(self, world_size: int) -> Axes:
        if world_size > 1:
            raise ValueError(f"parallel=dp is for one process, but the world has {world_size}; try parallel=ddp")
        return Axes()

    def prepare(self, recipe: Recipe, world: World) -> Replica:
        if recipe.device.type == "cpu" or torch.cuda.device_count() == 1:
            log.warning("parallel=dp has no effect on CPU or one GPU: DataParallel passes the whole batch to the model")
        elif recipe.draws.follows:
            recipe.draws.follows = False
            log.warning("parallel=dp: random numbers of the model depend on the number of GPUs; try parallel=ddp")
        wrapped = nn.DataParallel(recipe.module)
        optimizer = recipe.make_optimizer(recipe.module.parameters())
        return Replica(recipe, optimizer, wrapper=lambda function, *args: function(wrapped, *args))
