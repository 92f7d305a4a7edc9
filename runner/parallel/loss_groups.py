"""Objectives with several losses: in a step, each loss in order updates its own parameters with its own optimizer."""

from collections.abc import Callable, Mapping
from dataclasses import replace

from runner.checkpoints.extra_state import EXTRA_FACT, EXTRA_TENSORS
from runner.checkpoints.saved_state import MODEL, LocalState, SavedState
from runner.objectives.objective import LossGroup, loss_groups
from runner.parallel.replica import Replica, training_only
from runner.training.mode import ParallelModel, Recipe


def prepare_loss_groups(recipe: Recipe, prepare_group: Callable[[LossGroup], Replica]) -> ParallelModel:
    """Prepare the model for each loss of the recipe's objective. All ranks must call it."""
    models: dict[str, Replica] = {}
    for loss_group in loss_groups(recipe.objective, recipe.module):
        with training_only(loss_group):
            models[loss_group.name] = prepare_group(loss_group)
    return AlternatingModel(models) if len(models) > 1 else next(iter(models.values()))


class AlternatingModel:
    """A parallel model of an objective with several losses: one parallel model for each, over the same module."""

    def __init__(self, models: Mapping[str, Replica]):
        self.steppers = models
        self._first = first = next(iter(models.values()))
        # All models have the same module, so that the first one can serve the methods that use only the module.
        self.predict, self.weights, self.load_weights = first.predict, first.weights, first.load_weights
        self.local_parameters, self.parameters_written = first.local_parameters, first.parameters_written
        self.norm = first.norm

    @property
    def learning_rate(self) -> float:
        return self._first.learning_rate

    def state(self) -> LocalState:
        """Return all losses' states, under `turns.NAME` except the model and the scaler. All ranks must call it."""
        together = LocalState()
        of_model = (MODEL, EXTRA_TENSORS)
        for name, model in self.steppers.items():
            state = model.state()
            chunks = {key: chunk for key, chunk in state.chunks.items() if not key.startswith(of_model)}
            facts = {key: fact for key, fact in state.facts.items() if key not in ("scaler", EXTRA_FACT)}
            together |= LocalState(chunks, facts).under(f"turns.{name}")
        module = {key: chunk for key, chunk in state.chunks.items() if key.startswith(of_model)}
        facts = {key: fact for key, fact in state.facts.items() if key in ("scaler", EXTRA_FACT)}
        return together | LocalState(module, facts, state.replica_hashes)

    def load_state(self, saved: SavedState) -> None:
        common = {key: tensor for key, tensor in saved.tensors.items() if not key.startswith("turns.")}
        for name, model in self.steppers.items():
            own = saved.under(f"turns.{name}")
            model.load_state(replace(saved, tensors={**common, **own.tensors}, facts={**saved.facts, **own.facts}))
