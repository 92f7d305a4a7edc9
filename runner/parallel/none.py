"""One process without parallelism: the reference for all other modes."""

from runner.distributed.world import World
from runner.parallel.captured import CapturedReplica
from runner.parallel.loss_groups import prepare_loss_groups
from runner.parallel.replica import Replica
from runner.training.mode import Axes, Parallel, ParallelModel, Recipe


class NoParallel(Parallel):
    """parallel=none."""

    spans_devices = True
    supported_objectives = "several_losses"
    can_capture = True

    def axes(self, world_size: int) -> Axes:
        if world_size > 1:
            raise ValueError(f"parallel=none is for one process, but the world has {world_size}; try parallel=ddp")
        return Axes()

    def prepare(self, recipe: Recipe, world: World) -> ParallelModel:
        kind = CapturedReplica if self.captures else Replica
        return prepare_loss_groups(
            recipe, lambda loss_group: kind(recipe, recipe.make_optimizer(loss_group.parameters), loss_group)
        )
