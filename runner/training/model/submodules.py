"""Submodules of a model that sharding and activation checkpointing handle one by one."""

import inspect
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from typing import Any
from weakref import WeakSet

from torch import nn

from runner.distributed.module_class import subclass_of
from runner.errors import InputError

_attached: WeakSet[nn.Module] = WeakSet()
# Modules that forward does not use as a whole: see record_calls in runner.training.model.forward_calls.
divided: WeakSet[nn.Module] = WeakSet()


def attach_submodule(module: nn.Module, name: str, submodule: nn.Module) -> None:
    """Add a loss or an objective as the submodule `name`; the model is trained, parallelized and saved with it.

    Raises InputError if the model has an attribute of that name.
    """
    if hasattr(module, name):
        raise InputError(
            f"{type(submodule).__name__} would become the model's {name}, which exists; rename the model's attribute"
        )
    module.add_module(name, submodule)
    _attached.add(submodule)
    if isinstance(module, nn.Sequential):
        sequential: Any = module
        kind: Any = type(module)
        sequential.__class__ = subclass_of(kind, _WithoutAttached)
        sequential._attached_name = name


class _WithoutAttached(nn.Sequential):
    """A Sequential whose forward does not call its attached submodule, nor do its copies."""

    _attached_name: str

    def __iter__(self) -> Iterator[nn.Module]:
        return (child for name, child in self._modules.items() if child is not None and name != self._attached_name)

    def __len__(self) -> int:
        return len(self._modules) - 1


def attached_loss(module: nn.Module) -> nn.Module | None:
    """Return the attached loss, or None."""
    loss = module._modules.get("loss")
    return loss if loss in _attached else None


def offered(model: nn.Module, name: str, *arguments: Any) -> Any:
    """Return the model's method of this name if it accepts the arguments; None if the name means something else."""
    method: Any = getattr(model, name, None)
    try:
        inspect.signature(method).bind(*arguments)
    except (TypeError, ValueError):
        return None
    return method if inspect.isroutine(method) else None


def stages_or_children(model: nn.Module) -> list[nn.Module]:
    """Return the model's stages if it defines them, or else its children, without attached submodules."""
    if stages := offered(model, "stages"):
        return list(stages())
    return [child for child in model.children() if child not in _attached]


def called_modules(model: nn.Module, submodule: nn.Module) -> list[nn.Module]:
    """Return the outermost modules in a submodule that belong to the model and have a forward.

    A stage may be a temporary container of the model's modules; a ModuleList has no forward.
    """
    return _outermost(submodule, set(model.modules()) - {model}, set())


def whole_modules(model: nn.Module, submodule: nn.Module) -> list[nn.Module]:
    """Return the outermost modules in a submodule that belong to the model, and that forward uses only by calls.

    Without `record_calls`, they are the same as `called_modules`.
    """
    return _outermost(submodule, set(model.modules()) - {model}, divided)


def _outermost(module: nn.Module, accepted: AbstractSet[nn.Module], refused: AbstractSet[nn.Module]) -> list[nn.Module]:
    if module in accepted and module not in refused and type(module).forward is not nn.Module.forward:
        return [module]
    return [part for child in module.children() for part in _outermost(child, accepted, refused)]
