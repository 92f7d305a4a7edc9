"""The contents of containers and objects: how they are copied, compared and restored in place."""

import random
import sys
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from runner.objectives.objective import Objective

# Attributes of every module, except those that are saved. Of objectives: logged values.
_OF_MODULES = {*vars(nn.Module())} - {"training", "_parameters", "_buffers", "_modules"}
_OF_OBJECTIVES = {"_pass_values"}
SCALARS = (bool, int, float, complex, str, bytes, type(None))
_NAMESPACES = ("types", "argparse", "collections")  # modules of the standard library whose objects contain only values


def frozen_value(value: Any, seen: set[int] | None = None) -> Any:
    """Return a copy of what a value refers to, for `are_equal`. The states of torch's generators are left out."""
    if isinstance(value, Tensor):
        has_values = not (value.is_meta or is_lazy(value)) and value.layout == torch.strided
        return value.detach().clone() if has_values else None
    if isinstance(value, (*SCALARS, torch.Generator)):
        return None if isinstance(value, torch.Generator) else value
    seen = set() if seen is None else seen
    if id(value) in seen:
        return None
    seen.add(id(value))
    access = find_access(value)
    contents = access.read(value) if access else list(value) if isinstance(value, (tuple, frozenset)) else None
    if isinstance(contents, dict):
        contents = [[*contents], [frozen_value(each, seen) for each in contents.values()]]
    elif isinstance(contents, list):
        contents = [frozen_value(each, seen) for each in contents]
    fields = attributes_of(value) or {}
    return [type(value), contents, [*fields], [frozen_value(each, seen) for each in fields.values()]]


def are_equal(one: Any, other: Any) -> bool:
    """Return True if two results of `frozen_value` are equal, tensors to the bit."""
    if isinstance(one, (list, tuple)) and type(one) is type(other):
        return len(one) == len(other) and all(map(are_equal, one, other))
    with suppress(Exception):  # the comparison of other objects may raise anything
        if isinstance(one, Tensor):
            is_same_type = (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)
            return is_same_type and torch.equal(_bytes_of(one), _bytes_of(other))
        if isinstance(one, np.ndarray):
            return bool(np.array_equal(one, other, equal_nan=one.dtype.kind in "fc"))
        return one is other or bool(one == other) or (one != one and other != other)
    return False


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


@dataclass(frozen=True)
class Fields:
    """An object as the container of its attributes."""

    value: Any


@dataclass(frozen=True)
class _Access:
    """How the contents of a type of container are copied and restored."""

    kind: Any
    read: Callable[[Any], Any]
    fill: Callable[[Any, Any], object]


def _fill_fields(fields: Fields, contents: dict[str, Any]) -> None:
    attributes = vars(fields.value)
    for name in (attributes_of(fields.value) or {}).keys() - contents.keys():
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
    _Access(Fields, lambda fields: attributes_of(fields.value) or {}, _fill_fields),
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


def find_access(value: Any) -> _Access | None:
    """Return how the contents of a container are copied and restored; None for other objects."""
    return next((access for access in _ACCESS if isinstance(value, access.kind)), None)


def is_identical(container: Any, contents: Any) -> bool:
    """Return True if the container still has the contents that were copied from it."""
    access = find_access(container)
    assert access is not None
    now = access.read(container)
    if isinstance(contents, dict) and isinstance(container, (dict, Fields)):
        return [*now] == [*contents] and all(map(is_same, now.values(), contents.values()))
    if isinstance(contents, list):
        return len(now) == len(contents) and all(map(is_same, now, contents))
    return are_equal(now, contents)


def restore_contents(container: Any, contents: Any) -> None:
    """Restore the contents of a container in place, unless they are identical."""
    access = find_access(container)
    assert access is not None
    if not is_identical(container, contents):
        access.fill(container, contents)


def is_same(one: Any, other: Any) -> bool:
    """Return True for one and the same object, and for equal numbers and texts."""
    return one is other or (isinstance(one, SCALARS) and type(one) is type(other) and one == other)


def attributes_of(value: Any) -> dict[str, Any] | None:
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
