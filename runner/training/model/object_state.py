"""What the attributes of objects refer to, at any depth, to restore it in place and to compare it."""

import random
import sys
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode

from runner.input.pytree import tensors
from runner.objectives.objective import Objective

# Attributes of every module, except those that are saved. Of objectives: logged values.
_OF_MODULES = {*vars(nn.Module())} - {"training", "_parameters", "_buffers", "_modules"}
_OF_OBJECTIVES = {"_sums", "observed", "_counts_rows"}
_SCALARS = (bool, int, float, complex, str, bytes, type(None))
_NAMESPACES = ("types", "argparse", "collections")  # modules of the standard library whose objects contain only values
_LARGE = 10_000  # entries of a container, above which it is saved without what its entries refer to


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

    Classes, functions, objects of the standard library such as files and processes, and the entries of very large
    containers are not followed. Buffers are copied. Other tensors are copied if `copies`, or else before the first
    operator within `saving_writes` that writes to them.
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
                self._follow(Attribute(part, "_parameters"), tuple(part.parameters(recurse=False)), seen)
                self._follow(Attribute(part, "_buffers"), tuple(part.buffers(recurse=False)), seen)
            for name, value in (_attributes(part) or {}).items():
                self._follow(Attribute(part, name), value, seen)

    def _save_fields(self, attribute: Attribute, value: Any) -> dict[str, Any]:
        if attributes := _attributes(value):
            self._contents.append((attribute, _Fields(value), attributes))
        return attributes or {}

    def _follow(self, attribute: Attribute, value: Any, seen: set[int]) -> None:
        pending = [(value, attribute.name == "_buffers")]  # the flag is True for buffers
        while pending:
            value, is_buffer = pending.pop()
            if isinstance(value, _SCALARS) or id(value) in seen:
                continue
            seen.add(id(value))
            if isinstance(value, Tensor):
                if not (value.is_meta or is_lazy(value)):
                    copy = value.detach().clone() if is_buffer or self._copies else None
                    self._memory.append(_Memory(attribute, value, value.data, copy))
                continue
            entries = list(value) if isinstance(value, (tuple, frozenset)) else []
            if (access := _access(value)) is not None:
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
            if id(attribute.part) not in grown and not _is_identical(container, contents):
                _find_access(container).fill(container, contents)
        for memory in self._memory:
            if id(memory.of.part) not in grown:
                memory.restore()

    def changed(self) -> list[Attribute]:
        """Return the attributes that were set, or whose contents may have been changed."""
        found: list[Attribute] = []
        for attribute, container, contents in self._contents:
            if attribute.name:
                found += [] if _is_identical(container, contents) else [attribute]
                continue
            now = _attributes(attribute.part) or {}
            names = [name for name in {**contents, **now} if not _is_same(contents.get(name), now.get(name))]
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


def frozen_value(value: Any, seen: set[int] | None = None) -> Any:
    """Return a copy of what a value refers to, for `are_equal`. The states of torch's generators are left out."""
    if isinstance(value, Tensor):
        return None if value.is_meta or is_lazy(value) else value.detach().clone()
    if isinstance(value, (*_SCALARS, torch.Generator)):
        return None if isinstance(value, torch.Generator) else value
    seen = set() if seen is None else seen
    if id(value) in seen:
        return None
    seen.add(id(value))
    access = _access(value)
    contents = access.read(value) if access else list(value) if isinstance(value, (tuple, frozenset)) else None
    if isinstance(contents, dict):
        contents = [[*contents], [frozen_value(each, seen) for each in contents.values()]]
    elif isinstance(contents, list):
        contents = [frozen_value(each, seen) for each in contents]
    fields = _attributes(value) or {}
    return [type(value), contents, [*fields], [frozen_value(each, seen) for each in fields.values()]]


def are_equal(one: Any, other: Any) -> bool:
    """Compare two results of `frozen_value`. NaN equals itself."""
    if isinstance(one, (list, tuple)) and type(one) is type(other):
        return len(one) == len(other) and all(map(are_equal, one, other))
    with suppress(Exception):  # the comparison of other objects may raise anything
        if isinstance(one, Tensor):
            return one.shape == other.shape and torch.equal(one.nan_to_num(), other.nan_to_num())
        if isinstance(one, np.ndarray):
            return bool(np.array_equal(one, other, equal_nan=one.dtype.kind in "fc"))
        return one is other or bool(one == other) or (one != one and other != other)
    return False


@dataclass(frozen=True)
class _Fields:
    """An object as the container of its attributes."""

    value: Any


@dataclass(frozen=True)
class _Access:
    """How the contents of a type of container are copied and restored."""

    kind: Any
    read: Callable[[Any], Any]
    fill: Callable[[Any, Any], object]


def _fill_fields(fields: _Fields, contents: dict[str, Any]) -> None:
    attributes = vars(fields.value)
    for name in (_attributes(fields.value) or {}).keys() - contents.keys():
        del attributes[name]
    attributes.update(contents)


def _fill_by(add: str) -> Callable[[Any, Any], None]:
    def fill(container: Any, contents: Any) -> None:
        container.clear()
        getattr(container, add)(contents)

    return fill


def _fill_array(array: Any, contents: Any) -> None:
    array[...] = contents


def _set_bits(generator: np.random.Generator, state: Any) -> None:
    generator.bit_generator.state = state


_ACCESS = [
    _Access(_Fields, lambda fields: _attributes(fields.value) or {}, _fill_fields),
    _Access(dict, dict, _fill_by("update")),
    _Access((list, deque), list, _fill_by("extend")),
    _Access(set, set, _fill_by("update")),
    _Access(bytearray, bytes, _fill_by("extend")),
    _Access(np.ndarray, np.ndarray.copy, _fill_array),
    _Access(torch.Generator, torch.Generator.get_state, torch.Generator.set_state),
    _Access(random.Random, random.Random.getstate, random.Random.setstate),
    _Access(np.random.Generator, lambda generator: generator.bit_generator.state, _set_bits),
    _Access(np.random.RandomState, np.random.RandomState.get_state, np.random.RandomState.set_state),
]


def _access(value: Any) -> _Access | None:
    return next((access for access in _ACCESS if isinstance(value, access.kind)), None)


def _find_access(container: Any) -> _Access:
    access = _access(container)
    assert access is not None
    return access


def _is_identical(container: Any, contents: Any) -> bool:
    """Return True if the container still has the contents that were copied from it."""
    now = _find_access(container).read(container)
    if isinstance(contents, dict) and isinstance(container, (dict, _Fields)):
        return [*now] == [*contents] and all(map(_is_same, now.values(), contents.values()))
    if isinstance(contents, list):
        return len(now) == len(contents) and all(map(_is_same, now, contents))
    return are_equal(now, contents)


def _is_same(one: Any, other: Any) -> bool:
    return one is other or (isinstance(one, _SCALARS) and type(one) is type(other) and one == other)


def _attributes(value: Any) -> dict[str, Any] | None:
    """Return a copy of the attributes of an object that consists of values; None for other objects."""
    attributes = getattr(value, "__dict__", None)
    if type(attributes) is not dict:  # that of a class is read-only
        return None
    package = type(value).__module__.partition(".")[0]
    if package in sys.stdlib_module_names and package not in _NAMESPACES:
        return None
    left_out = _OF_MODULES if isinstance(value, nn.Module) else set()
    left_out = left_out | _OF_OBJECTIVES if isinstance(value, Objective) else left_out
    return {name: each for name, each in attributes.items() if name not in left_out}


def _registered(part: Any) -> Any:
    """Return what identifies the submodules, parameters and buffers that a module has registered; None for others."""
    if not isinstance(part, nn.Module):
        return None
    parameters = [(name, id(each), type(each)) for name, each in part.named_parameters(recurse=False)]
    buffers = [name for name, _ in part.named_buffers(recurse=False)]
    return [(name, id(child)) for name, child in part.named_children()], parameters, buffers
