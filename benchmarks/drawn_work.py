"""A work of the suite without its data: its model, trained on one batch that is drawn."""

import importlib
from collections.abc import Callable

import torch
import torch.nn.functional as F
from peers.works import TEXT, Work
from torch import Tensor, nn


def model_of(work: Work) -> nn.Module:
    """With the weights that it has in every call."""
    torch.manual_seed(0)
    module, _, name = work.model.rpartition(".")
    made: nn.Module = getattr(importlib.import_module(module), name)([*work.data.sample_shape], work.data.num_outputs)
    return made


def loss_of(work: Work, size: int) -> Callable[[Callable[[Tensor], Tensor]], Tensor]:
    """Gives the mean loss, (), of what a model makes of the same `size` samples in every call."""
    shape, num_outputs = work.data.sample_shape, work.data.num_outputs
    if work.data is TEXT:
        inputs, targets = torch.randint(num_outputs, (2, size, *shape))
    else:
        inputs, targets = torch.rand(size, *shape), torch.randint(num_outputs, (size,))
    return lambda model: F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())
