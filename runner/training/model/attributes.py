"""Tensors anywhere in the attributes of an object, also those that are neither parameters nor buffers of a module."""

from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Any

from torch import Tensor


def map_attributes(value: Any, function: Callable[[Tensor], Tensor], seen: dict[int, Any] | None = None) -> Any:
    """Return the value with its tensors replaced; lists, dicts and attributes of objects are changed in place.

    `seen` contains the objects that have been visited. Closures and the attributes of functions are not searched.
    """
    seen = {} if seen is None else seen
    if isinstance(value, Tensor):
        return function(value)
    if id(value) in seen or isinstance(value, (type, ModuleType, FunctionType)):
        return value
    seen[id(value)] = value  # keeps the object, so that its id is not used again
    if isinstance(value, tuple):
        items = [map_attributes(item, function, seen) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    attributes = getattr(value, "__dict__", None)
    for container in (value, attributes):
        if isinstance(container, (list, dict)):
            for key, item in list(enumerate(container) if isinstance(container, list) else container.items()):
                if (new := map_attributes(item, function, seen)) is not item:
                    container[key] = new
    return value
