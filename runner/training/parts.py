"""The parts of a model, for what handles them one by one: sharding and activation checkpointing."""

from typing import Any

from torch import nn


def stages_or_children(model: nn.Module) -> list[nn.Module]:
    """The stages that the model offers, or its children."""
    offers: Any = model
    return list(offers.stages()) if hasattr(model, "stages") else list(model.children())


def what_forward_calls(model: nn.Module, part: nn.Module) -> list[nn.Module]:
    """The outermost of the model's own modules in a part that can be called.

    A stage may be made for the occasion, around the model's own modules; a ModuleList is never called.
    """
    return _called(part, set(model.modules()) - {model})


def _called(part: nn.Module, own: set[nn.Module]) -> list[nn.Module]:
    if part in own and type(part).forward is not nn.Module.forward:
        return [part]
    return [called for child in part.children() for called in _called(child, own)]
