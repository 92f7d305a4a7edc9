"""The class of a module, which can be replaced without a change of its tensors, hooks and references."""

import functools
from typing import Any


@functools.cache
def subclass_of(kind: Any, mixin: type) -> Any:
    """Return a subclass of both, with the name and module of `kind`, to replace the class of an object."""
    members: dict[str, Any] = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    if kind.__reduce__ is object.__reduce__ and kind.__reduce_ex__ is object.__reduce_ex__:
        # pickle would look the class up by its name and find `kind`.
        def reduce(self: Any) -> tuple[Any, ...]:
            return _create, (kind, mixin), self.__getstate__()

        members["__reduce__"] = reduce
    return type(kind.__name__, (mixin, kind), members)


def _create(kind: Any, mixin: type) -> Any:
    created = subclass_of(kind, mixin)
    return created.__new__(created)
