"""Explicit all-reduce of gradients: as in DDP, but without overlapping communication and backward."""

from collections.abc import Iterable

import torch.distributed as dist
from torch import nn

from runner.distributed.world import World
from runner.objectives.objective import LossGroup
from runner.parallel.loss_groups import prepare_loss_groups
from runner.parallel.parameter_update import sum_gradients
from runner.parallel.replica import Replica
from runner.training.mode import Parallel, ParallelModel, Recipe


class AllReduce(Parallel):
    """parallel=allreduce: one all_reduce of one flattened buffer after the last backward of a step."""

    supported_objectives = "several_losses"
    is_elastic = True

    def prepare(self, recipe: Recipe, world: World) -> ParallelModel:
        for tensor in (*recipe.module.parameters(), *recipe.module.buffers()):
            if world.world_size > 1:
                dist.broadcast(tensor.data, src=0)

        def reduce(parameters: Iterable[nn.Parameter]) -> None:
            sum_gradients(parameters, world.collectives.sum)

        def prepare_group(loss_group: LossGroup) -> Replica:
            optimizer = recipe.make_optimizer(loss_group.parameters)
            return Replica(recipe, optimizer, loss_group, sum_over=world.collectives.sum, reduce=reduce)

        return prepare_loss_groups(recipe, prepare_group)
