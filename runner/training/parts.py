"""The parts of a model, for what handles them one by one: sharding and activation checkpointing."""

from typing import Any
from weakref import WeakSet

from torch import nn

_attached: WeakSet[nn.Module] = WeakSet()


def attach_part(module: nn.Module, name: str, part: nn.Module) -> None:
    """Let a loss or an objective with parameters be trained, spread and saved with the model, as `loss.NAME`.

    Raises ValueError where the model has something of that name.
    """
    if hasattr(module, name):
        raise ValueError(f"{type(part).__name__} would be trained as the model's {name}, which has one; rename its own")
    module.add_module(name, part)
    _attached.add(part)


def attached_loss(module: nn.Module) -> nn.Module | None:
    """The loss that was attached."""
    part = module._modules.get("loss")
    return part if part in _attached else None


def stages_or_children(model: nn.Module) -> list[nn.Module]:
    """The stages that the model offers, or its children; what is attached to it is none of either."""
    offers: Any = model
    if hasattr(model, "stages"):
        return list(offers.stages())
    return [child for child in model.children() if child not in _attached]


def what_forward_calls(model: nn.Module, part: nn.Module) -> list[nn.Module]:
    """The outermost of the model's own modules in a part that can be called.

    A stage may be made for the occasion, around the model's own modules; a ModuleList is never called.
    """
    return _called(part, set(model.modules()) - {model})


def _called(part: nn.Module, own: set[nn.Module]) -> list[nn.Module]:
    if part in own and type(part).forward is not nn.Module.forward:
        return [part]
    return [called for child in part.children() for called in _called(child, own)]
