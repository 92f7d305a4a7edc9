"""What a forward pass changes besides the logged values, to undo a pass or to repeat one."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


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
def restoring_state(*objects: Any) -> Iterator[None]:
    """Restore the ForwardState of the objects on exit."""
    state = ForwardState(*objects)
    try:
        yield
    finally:
        state.restore()


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
