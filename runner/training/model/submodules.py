"""Submodules of a model that sharding and activation checkpointing handle one by one."""

import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import nn

from runner.distributed.module_class import subclass_of
from runner.errors import InputError


def attach_submodule(module: nn.Module, name: str, submodule: nn.Module) -> None:
    """Add a loss or an objective as the submodule `name`; the model is trained, parallelized and saved with it.

    Raises InputError if the model has an attribute of that name.
    """
    if hasattr(module, name):
        raise InputError(
            f"{type(submodule).__name__} would become the model's {name}, which exists; rename the model's attribute"
        )
    module.add_module(name, submodule)
    vars(module)["_attached_name"] = name  # without `__setattr__`, which a model may override
    if isinstance(module, nn.Sequential):
        sequential: Any = module
        kind: Any = type(module)
        sequential.__class__ = subclass_of(kind, _WithoutAttached)


class _WithoutAttached(nn.Sequential):
    """A Sequential whose forward does not call its attached submodule, nor do its copies."""

    _attached_name: str

    def __iter__(self) -> Iterator[nn.Module]:
        return (child for name, child in self._modules.items() if child is not None and name != self._attached_name)

    def __len__(self) -> int:
        return len(self._modules) - 1


def attached_loss(module: nn.Module) -> nn.Module | None:
    """Return the attached loss, or None."""
    return module._modules["loss"] if vars(module).get("_attached_name") == "loss" else None


def offered(model: nn.Module, name: str, *arguments: Any) -> Any:
    """Return the model's method of this name if it accepts the arguments; None if the name means something else."""
    method: Any = getattr(model, name, None)
    try:
        inspect.signature(method).bind(*arguments)
    except (TypeError, ValueError):
        return None
    return method if inspect.isroutine(method) else None


def stages_or_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the model's stages if it defines them, or else its blocks and its children outside of them.

    If it defines neither, these are its children. Attached submodules are left out.
    """
    if stages := offered(model, "stages"):
        return list(stages())
    blocks = offered(model, "blocks")
    attached_name = vars(model).get("_attached_name")
    children = [child for name, child in model.named_children() if name != attached_name]
    return _divide(children, set(blocks() if blocks else ()))


def _divide(modules: Iterable[nn.Module], blocks: set[nn.Module]) -> list[nn.Module]:
    """Return the modules; one that contains blocks, but is none, is replaced by its parts."""
    parts: list[nn.Module] = []
    for module in modules:
        is_whole = module in blocks or blocks.isdisjoint(module.modules())
        parts += [module] if is_whole else _divide(module.children(), blocks)
    return parts


def called_modules(model: nn.Module, submodule: nn.Module) -> list[nn.Module]:
    """Return the outermost modules in a submodule that belong to the model and have a forward.

    A stage may be a temporary container of the model's modules; a ModuleList has no forward.
    """
    accepted = set(model.modules()) - {model}
    return _outermost(submodule, lambda module: module in accepted)


def whole_modules(model: nn.Module, submodule: nn.Module) -> list[nn.Module]:
    """Return the outermost modules in a submodule that belong to the model, and that forward uses only by calls.

    Unless a dry run has called `mark_as_divided`, they are the same as `called_modules`.
    """
    accepted = set(model.modules()) - {model}
    return _outermost(submodule, lambda module: module in accepted and not is_divided(module))


def _outermost(module: nn.Module, accepts: Callable[[nn.Module], bool]) -> list[nn.Module]:
    if accepts(module) and type(module).forward is not nn.Module.forward:
        return [module]
    return [part for child in module.children() for part in _outermost(child, accepts)]


def mark_as_divided(modules: Iterable[nn.Module]) -> None:
    """Record that forward does not use these modules as a whole, as an attribute of each."""
    for module in modules:
        vars(module)["_is_divided"] = True


def is_divided(module: nn.Module) -> bool:
    """Return True if a dry run has found that forward does not use the module as a whole."""
    return "_is_divided" in vars(module)
