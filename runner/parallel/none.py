"""One process, one device: the reference that every other mode is measured against."""

from torch import nn

from runner.config.schema import Config
from runner.distributed.world import World
from runner.parallel.replica import Replica
from runner.training.strategy import Axes, Recipe


class NoParallel:
    """parallel=none."""

    needs_group = False
    meta_init = False
    spans_devices = True

    def axes(self, world_size: int) -> Axes:
        if world_size > 1:
            raise ValueError(f"parallel=none is for one process, but the world has {world_size}; try parallel=ddp")
        return Axes()

    def check(self, config: Config, module: nn.Module) -> list[str]:
        return []

    def prepare(self, recipe: Recipe, world: World) -> Replica:
        optimizer = recipe.make_optimizer(recipe.module.parameters())
        return Replica(recipe.module, optimizer, recipe.loss, recipe.precision, recipe.clip_grad_norm)
