"""What the attributes of objects refer to, at any depth, to restore it after passes of a model."""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode

from runner.input.pytree import tensors
from runner.training.model.object_contents import (
    SCALARS,
    Fields,
    attributes_of,
    find_access,
    is_identical,
    is_same,
    restore_contents,
)

_LARGE = 10_000  # entries of a container, above which it is saved without what its entries refer to
_LARGE_ARRAY = 2**24  # bytes of an array of NumPy, above which it is not copied


class Attribute(NamedTuple):
    """The attribute of an object; the name of all its attributes together is empty."""

    part: Any
    name: str


@dataclass
class _Memory:
    """A tensor, and an alias of its memory, which stays valid if `tensor.data` is replaced."""

    of: Attribute
    tensor: Tensor
    data: Tensor
    copy: Tensor | None = None

    @property
    def is_replaced(self) -> bool:
        with suppress(NotImplementedError, RuntimeError):  # of sparse tensors, for example
            return not self.tensor.is_set_to(self.data)
        return False

    def restore(self) -> None:
        if self.copy is not None:
            self.data.copy_(self.copy)  # `data`, because autograd may have saved the tensor and checks its version
        if self.is_replaced:
            self.tensor.data = self.data


class ObjectState:
    """The attributes of some objects, and the contents of all containers, objects and tensors that they refer to.

    Classes, functions, objects of the standard library such as files and processes, large arrays of NumPy, and the
    entries of large containers are left out. Buffers are copied. Other tensors are copied if `copies`, or else before
    the first operator within `saving_writes` that writes to them.
    """

    def __init__(self, parts: Iterable[Any], copies: bool = False):
        self._parts, self._copies = list(parts), copies
        self._registered = [_registered(part) for part in self._parts]
        self._contents: list[tuple[Attribute, Any, Any]] = []  # containers, each with a copy of its contents
        self._memory: list[_Memory] = []
        seen = {id(part) for part in self._parts}
        for part in self._parts:
            self._save_fields(Attribute(part, ""), part)
            if isinstance(part, nn.Module):  # a ScriptModule does not keep them in its attributes
                for parameter in part.parameters(recurse=False):
                    self._follow(Attribute(part, "_parameters"), parameter, seen)
                for buffer in part.buffers(recurse=False):
                    self._follow(Attribute(part, "_buffers"), buffer, seen)
            for name, value in (attributes_of(part) or {}).items():
                self._follow(Attribute(part, name), value, seen)

    def _save_fields(self, attribute: Attribute, value: Any) -> dict[str, Any]:
        if attributes := attributes_of(value):
            self._contents.append((attribute, Fields(value), attributes))
        return attributes or {}

    def _follow(self, attribute: Attribute, value: Any, seen: set[int]) -> None:
        pending = [(value, attribute.name == "_buffers")]  # the flag is True for buffers
        while pending:
            value, is_buffer = pending.pop()
            if isinstance(value, SCALARS) or id(value) in seen:
                continue
            if isinstance(value, np.ndarray) and value.nbytes > _LARGE_ARRAY:
                continue
            seen.add(id(value))
            if isinstance(value, Tensor):
                if not (value.is_meta or is_lazy(value)):
                    copy = value.detach().clone() if is_buffer or self._copies else None
                    self._memory.append(_Memory(attribute, value, value.data, copy))
                continue
            entries = list(value) if isinstance(value, (tuple, frozenset)) else []
            if (access := find_access(value)) is not None:
                contents = access.read(value)
                self._contents.append((attribute, value, contents))
                entries = [*contents.values()] if isinstance(contents, dict) else contents
            if isinstance(entries, (list, set)) and len(entries) <= _LARGE:
                pending += [(each, is_buffer) for each in entries]
            pending += [(each, name == "_buffers") for name, each in self._save_fields(attribute, value).items()]

    def saving_writes(self) -> TorchDispatchMode:
        """Return a mode that copies a tensor before the first operator within the mode that writes to it."""
        return _SavingWrites(self._memory)

    def restore(self) -> None:
        """Restore everything, except modules in which a forward has registered submodules or tensors."""
        registered = zip(self._parts, self._registered, strict=True)
        grown = {id(part) for part, before in registered if _registered(part) != before}
        for attribute, container, contents in self._contents:
            if id(attribute.part) not in grown:
                restore_contents(container, contents)
        for memory in self._memory:
            if id(memory.of.part) not in grown:
                memory.restore()

    def changed(self) -> list[Attribute]:
        """Return the attributes that were set, or whose contents may have been changed."""
        found: list[Attribute] = []
        for attribute, container, contents in self._contents:
            if attribute.name:
                found += [] if is_identical(container, contents) else [attribute]
                continue
            now = attributes_of(attribute.part) or {}
            names = [name for name in {**contents, **now} if not is_same(contents.get(name), now.get(name))]
            found += [Attribute(attribute.part, name) for name in names]
        found += [memory.of for memory in self._memory if memory.copy is not None or memory.is_replaced]
        return [*{(id(attribute.part), attribute.name): attribute for attribute in found}.values()]

    def written(self) -> set[int]:
        """Return the `id` of each tensor whose memory was replaced, or written within `saving_writes`."""
        return {id(memory.tensor) for memory in self._memory if memory.copy is not None or memory.is_replaced}


class _SavingWrites(TorchDispatchMode):
    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # otherwise, torch.compile skips functions of the model within the mode

    def __init__(self, memory: Sequence[_Memory]):
        super().__init__()
        self._memory: dict[int, list[_Memory]] = {}
        for each in memory:
            with suppress(NotImplementedError):  # a sparse tensor has no storage
                self._memory.setdefault(each.data.untyped_storage()._cdata, []).append(each)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        schema = getattr(func, "_schema", None)  # a higher-order operator has none
        if schema is not None and schema.is_mutable:
            for number, argument in enumerate(schema.arguments):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    given = args[number] if number < len(args) else kwargs.get(argument.name)
                    for tensor in tensors(given):
                        self._save(tensor)
        return func(*args, **kwargs)

    def _save(self, tensor: Tensor) -> None:
        with suppress(NotImplementedError):
            for each in self._memory.get(tensor.untyped_storage()._cdata, ()):
                if each.copy is None:
                    each.copy = each.data.clone()


def _registered(part: Any) -> Any:
    """Return what identifies the submodules, parameters and buffers that a module has registered; None for others."""
    if not isinstance(part, nn.Module):
        return None
    parameters = [(name, id(each), type(each)) for name, each in part.named_parameters(recurse=False)]
    buffers = [name for name, _ in part.named_buffers(recurse=False)]
    return [(name, id(child)) for name, child in part.named_children()], parameters, buffers
