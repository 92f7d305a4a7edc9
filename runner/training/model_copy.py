"""The model as it is in mid-training, whole and on one device, whatever its mode has made of it."""

from collections.abc import Callable

import torch
from torch import nn

from runner.distributed.world import World
from runner.training.strategy import Spread


def copy_model(make: Callable[[], nn.Module], spread: Spread, dtype: torch.dtype, world: World) -> nn.Module | None:
    """The model that `make` builds with the present weights, on the CPU, in evaluation mode; None on ranks but 0.

    The weights are the model's own, also where an average of them is evaluated. All ranks must call it. It costs what
    the weights of a checkpoint do: time, and memory on rank 0.
    """
    weights = spread.weights()
    if world.rank != 0:
        return None
    model = make().to(dtype=dtype)
    # What the objective and its loss train is among the weights too, and is no part of the model that `make` builds.
    model.load_state_dict({name: weights[name] for name in model.state_dict()})
    return model.eval()
