"""One process, one device: the reference that every other mode is measured against."""

from torch import nn

from runner.config.schema import Config
from runner.distributed.world import World
from runner.parallel.replica import Replica
from runner.parallel.turns import take_turns
from runner.training.strategy import Axes, Carries, Recipe, Spread


class NoParallel:
    """parallel=none."""

    needs_group = False
    meta_init = False
    spans_devices = True
    carries: Carries = "several_losses"
    fails_at_once = True

    def axes(self, world_size: int) -> Axes:
        if world_size > 1:
            raise ValueError(f"parallel=none is for one process, but the world has {world_size}; try parallel=ddp")
        return Axes()

    def check(self, config: Config, module: nn.Module) -> list[str]:
        return []

    def prepare(self, recipe: Recipe, world: World) -> Spread:
        return take_turns(recipe, lambda turn: Replica(recipe, recipe.make_optimizer(turn.parameters), turn))
