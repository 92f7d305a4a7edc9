"""What a forward pass changes, to undo a pass or to repeat one."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from runner.objectives.objective import Objective, separate_passes
from runner.objectives.supervised import Supervised
from runner.training.model.object_state import ObjectState


def mark_as_stateful(part: Any) -> None:
    """Let `ForwardState` restore all that the object's attributes refer to, also the memory of its parameters."""
    vars(part)["_is_stateful"] = True  # without `__setattr__`, which a model may override


def parts_of(*objects: Any) -> list[Any]:
    """Return the objects, the modules that they refer to directly, such as a loss, and all submodules."""
    nested = [module for each in objects for module in vars(each).values() if isinstance(module, nn.Module)]
    several = [each.modules() if isinstance(each, nn.Module) else [each] for each in (*objects, *nested)]
    parts = [part for each in several for part in each]
    return [*{id(part): part for part in parts}.values()]


class ForwardState:
    """The buffers of modules, and the numbers, texts and random generators among the attributes of objects.

    It includes all submodules. Other attributes and parameters are only restored if they belong to a stateful object,
    because copies of all would be too large for a step.
    """

    def __init__(self, *objects: Any):
        parts = parts_of(*objects)
        self._objects = ObjectState([part for part in parts if "_is_stateful" in vars(part)], copies=True)
        parts = [part for part in parts if "_is_stateful" not in vars(part)]
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
        self._objects.restore()
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
    state = ForwardState(model, objective)
    with _restoring_random(model, objective):
        try:
            yield
        finally:
            state.restore()


@contextmanager
def restoring_all(model: nn.Module, objective: Objective) -> Iterator[ObjectState]:
    """Restore everything on exit, for passes before the run: also parameters, and what attributes refer to.

    A tensor is copied only if an operator writes to it.
    """
    # The dry run settles the options of a supervised objective, which has no other state.
    state = ObjectState([part for part in parts_of(model, objective) if not isinstance(part, Supervised)])
    with _restoring_random(model, objective):
        try:
            with state.saving_writes():
                yield state
        finally:
            state.restore()


@contextmanager
def _restoring_random(model: nn.Module, objective: Objective) -> Iterator[None]:
    gpus = {parameter.device for parameter in model.parameters() if parameter.device.type == "cuda"}
    of_python, of_numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(gpus), separate_passes(objective):
        try:
            yield
        finally:
            random.setstate(of_python)
            np.random.set_state(of_numpy)
