"""Weights of a checkpoint in a parallel model, and copies of a parallel model."""

import logging
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from runner.checkpoints.base_weights import complete
from runner.checkpoints.layout import LAST, TrainState, read_train_state
from runner.checkpoints.saved_state import SavedState, open_on_all_ranks
from runner.distributed.world import World
from runner.errors import as_input_error
from runner.optimization.precision import convert
from runner.training.callbacks.contract import Callbacks
from runner.training.mode import ParallelModel

log = logging.getLogger(__name__)


def restore(
    directory: Path, parallel_model: ParallelModel, callbacks: Callbacks, world: World, base: str | None = None
) -> TrainState:
    """Load this rank's part of the newest intact checkpoint, to continue the run. All ranks must call it.

    base: a copy of the frozen weights, as in `complete`.
    """
    saved = _open(directory, LAST, world, base)
    parallel_model.load_state(saved)
    callbacks.call("load_state", saved)
    return read_train_state(saved.path)


def restore_evaluated(
    directory: Path,
    parallel_model: ParallelModel,
    world: World,
    name: str = LAST,
    unaveraged: bool = False,
    base: str | None = None,
) -> TrainState:
    """Load only the weights that the run evaluated, or with `unaveraged` the model's. All ranks must call it.

    base: a copy of the frozen weights, as in `complete`.
    """
    saved = _open(directory, name, world, base)
    parallel_model.load_weights(saved if unaveraged else saved.evaluated())
    if saved.average():
        log.info("weights: %s", "the model's own, not averaged" if unaveraged else "averaged over the steps (ema)")
    return read_train_state(saved.path)


def _open(directory: Path, name: str, world: World, base: str | None) -> SavedState:
    saved = open_on_all_ranks(directory, name, world)
    with as_input_error():
        return complete(saved, base, world)


def copy_model(
    make_model: Callable[[], nn.Module], parallel_model: ParallelModel, dtype: torch.dtype, world: World
) -> nn.Module | None:
    """Return a new model with the current weights on rank 0, on the CPU and in evaluation mode; None on other ranks.

    The weights are not averaged, even if evaluations use an average of them (ema). All ranks must call it.
    """
    weights = parallel_model.weights()
    if world.rank != 0:
        return None
    model = make_model()
    convert(model, dtype)
    # The weights of an objective or its loss are not part of the model that `make_model` builds.
    model.load_state_dict({name: weights[name] for name in model.state_dict()})
    return model.eval()
