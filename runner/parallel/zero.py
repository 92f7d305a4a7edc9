"""ZeRO stage 1: a replica per rank under DDP; each rank keeps the optimizer state of the parameters that it updates."""

from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer

from runner.distributed.world import World
from runner.objectives.objective import LossGroup
from runner.parallel.ddp import bucket_options, wrap
from runner.parallel.loss_groups import prepare_loss_groups
from runner.parallel.replica import Replica
from runner.training.mode import Parallel, ParallelModel, Recipe
from runner.training.model.activation_checkpointing import Extent


class Zero(Parallel):
    """parallel=zero (Rajbhandari et al., "ZeRO", 2020); the options are ZeroRedundancyOptimizer's and DDP's."""

    needs_group = True
    splits_parameters = True
    splits_optimizer_state = True
    is_elastic = True
    supported_objectives = "several_losses"

    def __init__(self, parameters_as_bucket_view: bool = False, find_unused_parameters: bool = False):
        self.parameters_as_bucket_view = parameters_as_bucket_view
        self.find_unused_parameters = find_unused_parameters
        self.needs_all_gradients = not find_unused_parameters

    def check(self, module: nn.Module, activation_checkpointing: Extent) -> list[str]:
        """Refuse parameters of several dtypes, which ZeroRedundancyOptimizer cannot combine."""
        dtypes = sorted({str(p.dtype).removeprefix("torch.") for p in module.parameters() if p.requires_grad})
        if len(dtypes) > 1:
            return [
                f"parallel=zero needs parameters of one dtype, but the model has {' and '.join(dtypes)}; "
                "try parallel=ddp"
            ]
        return []

    def prepare(self, recipe: Recipe, world: World) -> ParallelModel:
        return prepare_loss_groups(recipe, lambda loss_group: self._prepare_group(recipe, loss_group, world))

    def _prepare_group(self, recipe: Recipe, loss_group: LossGroup, world: World) -> Replica:
        whole = recipe.make_optimizer(loss_group.parameters)  # only for its groups
        kind = ZeroRedundancyOptimizer if world.membership is None else _SendingInTurn
        optimizer = kind(
            [{**group} for group in whole.param_groups],
            # torch only calls it with parameter groups that contain their options.
            optimizer_class=recipe.make_optimizer,  # type: ignore[arg-type]
            parameters_as_bucket_view=self.parameters_as_bucket_view,
        )
        # After the optimizer, whose buckets make channels_last parameters contiguous: DDP copies their strides.
        wrapped = wrap(recipe, world, gradient_as_bucket_view=True, find_unused_parameters=self.find_unused_parameters)
        options = bucket_options(wrapped, world, is_summed=wrapped.sum_on_cpu())
        return Replica(
            recipe, optimizer, loss_group, without_sync=wrapped.no_sync, local_optimizer=optimizer.optim, **options
        )


class _SendingInTurn(ZeroRedundancyOptimizer):
    """ZeroRedundancyOptimizer whose ranks send their updated parameters one after the other, in an elastic world.

    If all ranks send at once, and two of them are lost, the others may wait for each other in gloo's broadcasts. Then
    they cannot leave the group until its timeout, even though they know of the loss.
    """

    def _sync_params(self) -> None:
        for rank in range(self.world_size):
            for work in self._broadcast_params_from_rank(rank):  # type: ignore[attr-defined]
                work.wait()
