"""One process without parallelism: the reference for all other modes."""

from runner.distributed.world import World
from runner.parallel.loss_groups import prepare_loss_groups
from runner.parallel.replica import Replica
from runner.training.mode import Axes, Parallel, ParallelModel, Recipe


class NoParallel(Parallel):
    """parallel=none."""

    spans_devices = True
    supported_objectives = "several_losses"

    def axes(self, world_size: int) -> Axes:
        if world_size > 1:
            raise ValueError(f"parallel=none is for one process, but the world has {world_size}; try parallel=ddp")
        return Axes()

    def prepare(self, recipe: Recipe, world: World) -> ParallelModel:
        return prepare_loss_groups(
            recipe, lambda loss_group: Replica(recipe, recipe.make_optimizer(loss_group.parameters), loss_group)
        )
