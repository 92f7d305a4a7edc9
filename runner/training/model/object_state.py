"""What the attributes of objects refer to, at any depth, to restore it after passes of a model."""

import random
import sys
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode

from runner.input.pytree import tensors

_SCALARS = (bool, int, float, complex, str, bytes, type(None))
# Attributes of every module, except those that are saved, and the logged values of an objective.
_LEFT_OUT = {*vars(nn.Module()), "_pass_values"} - {"training", "_parameters", "_buffers", "_modules"}
_NAMESPACES = ("types", "argparse", "collections")  # modules of the standard library whose objects contain only values
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

    @property
    def is_written(self) -> bool:
        return self.copy is not None or self.is_replaced

    def restore(self) -> None:
        if self.copy is not None:
            self.data.copy_(self.copy)  # `data`, because autograd may have saved the tensor and checks its version
        if self.is_replaced:
            self.tensor.data = self.data


class ObjectState:
    """The attributes of some objects, and the contents of all containers, objects and tensors that they refer to.

    Classes, functions, objects of the standard library such as files and processes, and large arrays of NumPy are left
    out. Buffers are copied. Other tensors are copied if `copies`, or else before the first operator within
    `saving_writes` that writes to them.
    """

    def __init__(self, parts: Iterable[Any], copies: bool = False):
        self._parts, self._copies = list(parts), copies
        self._registered = [_registered(part) for part in self._parts]
        self._attributes: list[tuple[Attribute, Any, dict[str, Any]]] = []  # objects, each with its attributes
        self._contents: list[tuple[Attribute, Any, Any]] = []  # containers, each with a copy of its contents
        self._memory: list[_Memory] = []
        seen = {id(part) for part in self._parts}
        for part in self._parts:
            attributes = self._save_attributes(Attribute(part, ""), part)
            if isinstance(part, nn.Module):  # a ScriptModule does not keep them in its attributes
                for parameter in part.parameters(recurse=False):
                    self._follow(Attribute(part, "_parameters"), parameter, seen)
                for buffer in part.buffers(recurse=False):
                    self._follow(Attribute(part, "_buffers"), buffer, seen)
            for name, value in attributes.items():
                self._follow(Attribute(part, name), value, seen)

    def _save_attributes(self, attribute: Attribute, value: Any) -> dict[str, Any]:
        if attributes := _attributes_of(value):
            self._attributes.append((attribute, value, attributes))
        return attributes

    def _follow(self, attribute: Attribute, value: Any, seen: set[int]) -> None:
        pending = [(value, attribute.name == "_buffers")]  # the flag is True for buffers
        while pending:
            value, is_buffer = pending.pop()
            if isinstance(value, _SCALARS) or id(value) in seen:
                continue
            if isinstance(value, np.ndarray) and value.nbytes > _LARGE_ARRAY:
                continue
            seen.add(id(value))
            if isinstance(value, Tensor):
                if not (value.is_meta or is_lazy(value)):
                    copy = value.detach().clone() if is_buffer or self._copies else None
                    self._memory.append(_Memory(attribute, value, value.data, copy))
                continue
            if (contents := _read(value)) is not None:
                self._contents.append((attribute, value, contents))
            pending += [(each, is_buffer) for each in _entries(value)]
            pending += [(each, name == "_buffers") for name, each in self._save_attributes(attribute, value).items()]

    def saving_writes(self) -> TorchDispatchMode:
        """Return a mode that copies a tensor before the first operator within the mode that writes to it."""
        return _SavingWrites(self._memory)

    def restore(self) -> None:
        """Restore everything, except modules in which a forward has registered submodules or tensors."""
        registered = zip(self._parts, self._registered, strict=True)
        grown = {id(part) for part, before in registered if _registered(part) != before}
        for attribute, value, attributes in self._attributes:
            if id(attribute.part) not in grown:
                for name in _attributes_of(value).keys() - attributes.keys():
                    del vars(value)[name]
                vars(value).update(attributes)
        for attribute, container, contents in self._contents:
            if id(attribute.part) not in grown and not _has_contents(container, contents):
                _write(container, contents)
        for memory in self._memory:
            if id(memory.of.part) not in grown:
                memory.restore()

    def changed(self) -> list[Attribute]:
        """Return the attributes that were set, or whose contents may have been changed."""
        found: list[Attribute] = []
        for attribute, value, before in self._attributes:
            now = _attributes_of(value)
            names = [name for name in {**before, **now} if not _is_same(before.get(name), now.get(name))]
            found += [attribute if attribute.name else Attribute(value, name) for name in names]
        found += [attribute for attribute, *pair in self._contents if not _has_contents(*pair)]
        found += [memory.of for memory in self._memory if memory.is_written]
        return [*{(id(attribute.part), attribute.name): attribute for attribute in found}.values()]

    def written(self) -> set[int]:
        """Return the `id` of each tensor whose memory was replaced, or written within `saving_writes`."""
        return {id(memory.tensor) for memory in self._memory if memory.is_written}


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


def frozen_value(value: Any, seen: set[int] | None = None) -> Any:
    """Return a copy of what a value refers to, in lists that are equal if the values are, tensors to the bit.

    The states of torch's generators are left out.
    """
    if isinstance(value, _SCALARS):
        return repr(value)  # nan is equal to nan, and 1 differs from 1.0
    seen = set() if seen is None else seen
    if id(value) in seen:
        return None
    seen.add(id(value))
    if isinstance(value, Tensor):
        if value.is_meta or is_lazy(value) or value.layout != torch.strided:
            return None
        whole = value.detach().resolve_conj().resolve_neg().cpu().contiguous()
        return [str(value.device), value.dtype, value.shape, whole.reshape(-1).view(torch.uint8).numpy().tobytes()]
    if isinstance(value, np.ndarray):
        return [value.dtype, value.shape, value.tobytes()]
    contents = None if isinstance(value, torch.Generator) else _read(value)
    attributes = _attributes_of(value)
    keys = [frozen_value(key, seen) for key in contents] if isinstance(contents, dict) else []
    entries = _entries(value if contents is None else contents)
    entries = [frozen_value(each, seen) for each in (*entries, *attributes.values())]
    return [type(value), keys, [*attributes], entries]


def _attributes_of(value: Any) -> dict[str, Any]:
    """Return a copy of the attributes of an object that consists of values; no attributes for other objects."""
    attributes = getattr(value, "__dict__", None)
    package = type(value).__module__.partition(".")[0]
    is_library = package in sys.stdlib_module_names and package not in _NAMESPACES
    if is_library or type(attributes) is not dict:  # that of a class is read-only
        return {}
    return {name: each for name, each in attributes.items() if name not in _LEFT_OUT}


def _entries(value: Any) -> list[Any]:
    """Return what a container refers to."""
    if isinstance(value, dict):
        return [*value.values()]
    return [*value] if isinstance(value, (list, deque, tuple, set, frozenset)) else []


def _read(container: Any) -> Any:
    """Return a copy of the contents of a container that can be changed, or of a generator's state; None for others."""
    match container:
        case dict():
            return dict(container)
        case list() | deque() | set():
            return list(container)
        case np.ndarray():
            return container.copy()
        case torch.Generator() | np.random.RandomState():
            return container.get_state()
        case random.Random():
            return container.getstate()
        case np.random.Generator():
            return container.bit_generator.state
    return None


def _write(container: Any, contents: Any) -> None:
    """Restore the contents of a container in place."""
    match container:
        case dict() | set():
            container.clear()
            container.update(contents)
        case list() | deque():
            container.clear()
            container.extend(contents)
        case np.ndarray():
            container[...] = contents
        case torch.Generator() | np.random.RandomState():
            container.set_state(contents)
        case random.Random():
            container.setstate(contents)
        case np.random.Generator():
            container.bit_generator.state = contents


def _has_contents(container: Any, contents: Any) -> bool:
    """Return True if the container still has the contents that were read from it."""
    now = _read(container)
    if isinstance(container, dict):
        return [*now] == [*contents] and all(map(_is_same, now.values(), contents.values()))
    if isinstance(container, (list, deque, set)):
        return len(now) == len(contents) and all(map(_is_same, now, contents))
    return bool(frozen_value(now) == frozen_value(contents))


def _is_same(one: Any, other: Any) -> bool:
    """Return True for one and the same object, and for equal numbers and texts."""
    return one is other or (isinstance(one, _SCALARS) and type(one) is type(other) and one == other)


def _registered(part: Any) -> Any:
    """Return what identifies the submodules, parameters and buffers that a module has registered; None for others."""
    if not isinstance(part, nn.Module):
        return None
    parameters = [(name, id(each), type(each)) for name, each in part.named_parameters(recurse=False)]
    buffers = [name for name, _ in part.named_buffers(recurse=False)]
    return [(name, id(child)) for name, child in part.named_children()], parameters, buffers
