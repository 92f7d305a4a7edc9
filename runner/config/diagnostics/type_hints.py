"""Whether a value out of a file or a command line suits a type annotation, and the words to say that it doesn't."""

import os
import re
import types
import typing
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any, Union

from runner.errors import nearest

# type: one such value in words, several of them, and an example as typed
_WORDS: dict[Any, tuple[str, str, str]] = {
    int: ("an integer (int)", "integers", "1"),
    float: ("a number (float)", "numbers", "0.1"),
    bool: ("true or false (bool)", "true or false", "true"),
    str: ("text (str)", "text", "name"),
    type(None): ("null", "null", "null"),
}
_READ_AS_OTHERS = re.compile(r"|null|true|false|[-+]?\.?\d[\d._]*(e[-+]?\d+)?|\W.*", re.IGNORECASE)


def suits(annotation: Any, value: Any) -> bool:
    """An annotation that is not understood suits everything: it is no reason to refuse."""
    annotation = _unaliased(annotation)
    if annotation is Any or (isinstance(value, Mapping) and "_target_" in value):
        return True  # what a nested node makes is only known once it is made
    kind, arguments = _parts(annotation)
    if kind is Union:
        return any(suits(member, value) for member in arguments)
    if kind is typing.Literal:
        return any(value == choice and type(value) is type(choice) for choice in arguments)
    if kind in (int, float):  # True is an int to Python, and 1 a float to readers
        return isinstance(value, (int, kind)) and not isinstance(value, bool)
    try:
        return _suits_class(kind, arguments, value)
    except TypeError:
        return True  # no class at all, or a Protocol or TypedDict, which cannot be asked


def describe(annotation: Any) -> str:
    """What a value must be, in words: `a number (float) or null`."""
    annotation = _unaliased(annotation)
    kind, arguments = _parts(annotation)
    if kind is Union:
        return " or ".join(describe(member) for member in _typeable(arguments))
    if choices := _choices(annotation):
        return "one of " + ", ".join(map(show, choices))
    if kind in _WORDS:
        return _WORDS[kind][0]
    name = re.sub(r"([A-Za-z_]\w*\.)+", "", str(annotation)) if arguments else getattr(kind, "__name__", str(kind))
    if _is_list(kind):
        count = f" of {len(arguments)}" if _is_fixed(kind, arguments) else " of"
        return f"a list{count} {_several(arguments[0])} ({name})" if arguments else f"a list ({name})"
    if _is_mapping(kind):
        return f"a mapping ({name})"
    return f"a path ({name})" if _is_path(kind) else f"a {name} (given as a node with a _target_)"


def fix(annotation: Any, value: Any, default: Any = None) -> str:
    """The end of a message: how a value that does not suit becomes one that does."""
    kind, arguments = _parts(_unaliased(annotation))
    members = arguments if kind is Union else [annotation]
    if near := nearest(str(value), [show(choice) for member in members for choice in _choices(member)]):
        return f"; did you mean {near}?"
    if isinstance(value, (bool, int, float)) and suits(annotation, str(value)):
        return f"; for the text {show(value)} type \"'{show(value)}'\""
    usable = default is not None and suits(annotation, default)
    example = show(default) if usable else as_typed(annotation)
    return f"; for example {example}" if example else ""


def as_typed(annotation: Any) -> str | None:
    """An example of a value; None where only a node with a _target_ can give one."""
    annotation = _unaliased(annotation)
    kind, arguments = _parts(annotation)
    if kind is Union:
        return as_typed(_typeable(arguments)[0])
    if choices := _choices(annotation):
        return show(choices[0])
    if kind in _WORDS:
        return _WORDS[kind][2]
    if _is_list(kind):
        items = [as_typed(member) or "value" for member in arguments if member is not Ellipsis] or ["value"]
        return f"[{','.join(items if _is_fixed(kind, arguments) else items[:1] * 2)}]"
    if _is_mapping(kind):
        return "{name:value}"
    return "folder/file" if _is_path(kind) else None


def show(value: Any) -> str:
    """A value as it is typed on the command line."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{name}:{show(item)}" for name, item in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return f"[{','.join(map(show, value))}]"
    return str(value)


def show_quoted(value: Any) -> str:
    """As `show`; text that would be read as something else is in quotes, so that a message does not look absurd."""
    return f"'{value}'" if isinstance(value, str) and _READ_AS_OTHERS.fullmatch(value) else show(value)


def _suits_class(kind: Any, arguments: Sequence[Any], value: Any) -> bool:
    if issubclass(kind, Enum):
        return isinstance(value, str) and value in kind.__members__
    if _is_path(kind):
        return isinstance(value, str)  # the only way in which a file can hold a path
    if _is_list(kind):
        if not isinstance(value, (list, tuple)):
            return False
        if _is_fixed(kind, arguments):
            return len(value) == len(arguments) and all(map(suits, arguments, value))
        return not arguments or all(suits(arguments[0], item) for item in value)
    if _is_mapping(kind) and len(arguments) == 2:
        of_names, of_items = arguments
        return isinstance(value, Mapping) and all(suits(of_names, n) and suits(of_items, v) for n, v in value.items())
    return isinstance(value, kind)


def _parts(annotation: Any) -> tuple[Any, tuple[Any, ...]]:
    kind = typing.get_origin(annotation) or annotation
    return Union if kind is types.UnionType else kind, typing.get_args(annotation)


def _unaliased(annotation: Any) -> Any:
    """What is behind `type Name = ...` and NewType."""
    while (behind := getattr(annotation, "__value__", getattr(annotation, "__supertype__", None))) is not None:
        annotation = behind
    return annotation


def _typeable(members: Sequence[Any]) -> Sequence[Any]:
    """The members of a union that a user can type; all of them if null is the only one."""
    typeable = [member for member in members if as_typed(member) is not None]
    return members if typeable in ([], [type(None)]) else typeable


def _several(annotation: Any) -> str:
    kind, arguments = _parts(annotation)
    members = _typeable(arguments) if kind is Union else [annotation]
    return _WORDS[members[0]][1] if len(members) == 1 and members[0] in _WORDS else "values"


def _choices(annotation: Any) -> list[Any]:
    kind, arguments = _parts(annotation)
    if kind is typing.Literal:
        return list(arguments)
    return list(kind.__members__) if isinstance(kind, type) and issubclass(kind, Enum) else []


def _is_list(kind: Any) -> bool:
    return isinstance(kind, type) and kind is not object and (issubclass(list, kind) or issubclass(tuple, kind))


def _is_mapping(kind: Any) -> bool:
    return isinstance(kind, type) and kind is not object and issubclass(dict, kind)


def _is_path(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, os.PathLike)


def _is_fixed(kind: Any, arguments: Sequence[Any]) -> bool:
    """A tuple with one annotation per item."""
    return kind is tuple and bool(arguments) and arguments[-1] is not Ellipsis
