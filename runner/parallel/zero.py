"""ZeRO stage 1: a replica per rank under DDP, and each rank keeps and applies the optimizer of its own parameters."""

from collections.abc import Mapping

import torch
from torch.distributed.optim import ZeroRedundancyOptimizer

from runner.config.schema import Config
from runner.distributed.world import World
from runner.parallel.buckets import FixedBuckets
from runner.parallel.optimizer_state import load_optimizer_state, optimizer_state
from runner.parallel.replica import Replica
from runner.parallel.turns import take_turns
from runner.training.batch import MicroBatch, StepBatch
from runner.training.objective import Prediction, Turn, Within
from runner.training.saved_state import HeldState, SavedState
from runner.training.strategy import Axes, Carries, Recipe, Spread, Stepping


class Zero:
    """parallel=zero (Rajbhandari et al., "ZeRO", 2020); the options are ZeroRedundancyOptimizer's and DDP's."""

    needs_group = True
    meta_init = False
    spans_devices = False
    carries: Carries = "several_losses"
    fails_at_once = True

    def __init__(self, parameters_as_bucket_view: bool = False, find_unused_parameters: bool = False):
        self.parameters_as_bucket_view = parameters_as_bucket_view
        self.find_unused_parameters = find_unused_parameters

    def axes(self, world_size: int) -> Axes:
        return Axes(replicate=world_size)

    def check(self, config: Config, module: torch.nn.Module) -> list[str]:
        return []

    def prepare(self, recipe: Recipe, world: World) -> Spread:
        return take_turns(recipe, lambda turn: self._spread(recipe, turn, world))

    def _spread(self, recipe: Recipe, turn: Turn, world: World) -> "ShardedOptimizer":
        whole = recipe.make_optimizer(turn.parameters)  # which holds nothing before its first step
        optimizer = ZeroRedundancyOptimizer(
            [{**group} for group in whole.param_groups],
            # All that is asked of the class is to make an optimizer of parameter groups, options included.
            optimizer_class=recipe.make_optimizer,  # type: ignore[arg-type]
            parameters_as_bucket_view=self.parameters_as_bucket_view,
        )
        # After the optimizer, whose buckets make channels_last parameters contiguous: DDP's gradients follow them.
        device_ids = [recipe.device] if recipe.device.type == "cuda" else None
        wrapped = FixedBuckets(
            Within(recipe.module),
            device_ids=device_ids,
            gradient_as_bucket_view=True,
            find_unused_parameters=self.find_unused_parameters,
        )
        replica = Replica(
            recipe,
            optimizer,
            turn,
            sum_over=world.collectives.sum,
            within=wrapped,
            # Where DDP averages: the loss is summed over the ranks.
            loss_scale=1 if wrapped.sum_on_cpu() else world.world_size,
            without_sync=wrapped.no_sync,
            reduce=wrapped.check_gradients,
        )
        return ShardedOptimizer(replica, optimizer)


class ShardedOptimizer:
    """A replica whose optimizer state is whole on no rank: each has that of its own parameters, in `optim`."""

    def __init__(self, replica: Replica, optimizer: ZeroRedundancyOptimizer):
        self._replica, self._optimizer = replica, optimizer

    def forward_backward(self, batch: StepBatch) -> torch.Tensor:
        return self._replica.forward_backward(batch)

    def gradients(self) -> list[torch.Tensor]:
        return self._replica.gradients()

    def skip(self) -> None:
        self._replica.skip()

    def step(self, lr_factor: float, want_norm: bool) -> float | None:
        return self._replica.step(lr_factor, want_norm)

    @property
    def learning_rate(self) -> float:
        return self._replica.learning_rate

    @property
    def turns(self) -> Mapping[str, Stepping]:
        return {self._replica.turn.name: self}

    def predict(self, micro_batch: MicroBatch) -> Prediction:
        return self._replica.predict(micro_batch)

    def state(self) -> HeldState:
        """As Replica.state, but that each rank writes the state of its own parameters."""
        own = optimizer_state(self._replica.module, self._optimizer.optim, lambda parameter, tensor: True)
        # The groups of all ranks' parameters; the optimizer by that name keeps nothing itself.
        groups = optimizer_state(self._replica.module, self._optimizer).facts["optimizer"]["param_groups"]
        own.facts["optimizer"]["param_groups"] = groups
        scaler = self._replica.precision.scaler.state_dict()
        return self._replica.model_state() | own | HeldState(facts={"scaler": scaler})

    def load_state(self, saved: SavedState) -> None:
        self._replica.load_weights(saved)
        load_optimizer_state(self._replica.module, self._optimizer.optim, saved)
        if scaler := saved.facts.get("scaler"):
            self._replica.precision.scaler.load_state_dict(dict(scaler))

    def weights(self) -> dict[str, torch.Tensor]:
        return self._replica.weights()

    def load_weights(self, saved: SavedState) -> None:
        self._replica.load_weights(saved)

    def held(self) -> dict[str, torch.Tensor]:
        return self._replica.held()

    def changed(self) -> None:
        self._replica.changed()
