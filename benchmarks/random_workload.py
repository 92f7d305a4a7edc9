"""A workload of the suite without its data: the model, trained on one random batch."""

import importlib
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from peers.works import TEXT, Work
from torch import Tensor, nn

sys.path.append(str(Path(__file__).resolve().parent.parent))  # the folder of the package models


def model_of(work: Work) -> nn.Module:
    """Return the model, with the same weights in every call."""
    torch.manual_seed(0)
    module, _, name = work.model.rpartition(".")
    made: nn.Module = getattr(importlib.import_module(module), name)([*work.data.sample_shape], work.data.num_outputs)
    return made


def loss_of(work: Work, size: int) -> Callable[[Callable[[Tensor], Tensor]], Tensor]:
    """Return a function that computes a model's mean loss, (), on the same `size` random samples in every call."""
    shape, num_outputs = work.data.sample_shape, work.data.num_outputs
    if work.data is TEXT:
        inputs, targets = torch.randint(num_outputs, (2, size, *shape))
    else:
        inputs, targets = torch.rand(size, *shape), torch.randint(num_outputs, (size,))
    return lambda model: F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())
