"""What a forward pass changes, to undo a pass or to repeat one."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from runner.objectives.objective import Objective


class ForwardState:
    """The buffers of modules, and the numbers, texts and random generators among the attributes of objects.

    It includes all submodules. Other attributes, such as lists and dicts, are not restored.
    """

    def __init__(self, *objects: Any):
        parts = [part for each in objects for part in (each.modules() if isinstance(each, nn.Module) else [each])]
        self._buffers = [
            (part._buffers, name, buffer, buffer.clone())
            for part in parts
            if isinstance(part, nn.Module)
            for name, buffer in part.named_buffers(recurse=False)
        ]
        attributes = [(vars(part), name, value) for part in parts for name, value in vars(part).items()]
        self._values = [each for each in attributes if isinstance(each[2], (int, float, str))]
        generators = [value for *_, value in attributes if isinstance(value, torch.Generator)]
        self._generators = [(generator, generator.get_state()) for generator in generators]

    def restore(self) -> None:
        for buffers, name, buffer, value in self._buffers:
            buffer.data.copy_(value)  # `data`, because autograd may have saved the buffer and checks its version
            buffers[name] = buffer
        for attributes, name, value in self._values:
            attributes[name] = value
        for generator, state in self._generators:
            generator.set_state(state)


@contextmanager
def restoring_state(model: nn.Module, objective: Objective) -> Iterator[None]:
    """Restore on exit what passes of a model and an objective change, also random generators and logged values."""
    gpus = {parameter.device for parameter in model.parameters() if parameter.device.type == "cuda"}
    state, of_python, of_numpy = ForwardState(model, objective), random.getstate(), np.random.get_state()
    logged = objective._sums, objective.observed
    objective._sums = objective.observed = None
    with torch.random.fork_rng(gpus):
        try:
            yield
        finally:
            state.restore()
            objective._sums, objective.observed = logged
            random.setstate(of_python)
            np.random.set_state(of_numpy)


@contextmanager
def restoring_bounded(model: nn.Module) -> Iterator[None]:
    """Restore the weights of embeddings with `max_norm`, whose forward scales the rows that it reads."""
    weights = [
        module.weight
        for module in model.modules()
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None
    ]
    before = [(weight, weight.detach().clone()) for weight in weights]
    try:
        yield
    finally:
        for weight, value in before:
            if not weight.is_meta:
                weight.detach().copy_(value)
