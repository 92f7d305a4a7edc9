"""Checks of values from a file or the command line against type annotations, and descriptions of annotations."""

import inspect
import os
import re
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, Union

from runner.errors import nearest

_WORDS = {
    int: "an integer (int)",
    float: "a number (float)",
    bool: "true or false (bool)",
    str: "text (str)",
    type(None): "null",
}


def suits(annotation: Any, value: Any) -> bool:
    """Return True if the value suits the annotation, or if the annotation cannot be checked."""
    kind, arguments = _parts(annotation)
    if kind is Any or (isinstance(value, Mapping) and "_target_" in value):
        return True  # the type of a nested node's object is unknown until it is created
    if kind is Union:
        return any(suits(member, value) for member in arguments)
    if kind is typing.Literal:
        return any(value == choice and type(value) is type(choice) for choice in arguments)
    if kind in (int, float):  # in Python True is an int, and in YAML 1 can be a float
        return isinstance(value, (int, kind)) and not isinstance(value, bool)
    try:
        return _suits_class(kind, arguments, value)
    except TypeError:
        return True  # not a class, or a Protocol or TypedDict, which isinstance rejects


def describe(annotation: Any) -> str:
    """Return a description of the annotation: `a number (float) or null`."""
    kind, arguments = _parts(annotation)
    if kind is Union:
        return " or ".join(map(describe, arguments))
    if choices := _choices(annotation):
        return f"one of {', '.join(map(show, choices))}"
    if kind in _WORDS:
        return _WORDS[kind]
    for is_kind, word in ((_is_list, "list"), (_is_mapping, "mapping"), (_is_path, "path")):
        if is_kind(kind):
            return f"a {word} ({type_name(annotation)})"
    return f"a {type_name(annotation)} (given as a node with a _target_)"


def fix(annotation: Any, value: Any, default: Any = None) -> str:
    """Return the end of a message: a similar valid value, the quoted text, or the default."""
    kind, arguments = _parts(annotation)
    members = arguments if kind is Union else [annotation]
    if near := nearest(str(value), [show(choice) for member in members for choice in _choices(member)]):
        return f"; did you mean {near}?"
    if isinstance(value, (bool, int, float)) and suits(annotation, str(value)):
        return f"; for the text {show(value)} type \"'{show(value)}'\""
    usable = default is not None and suits(annotation, default)
    return f"; for example {show(default)}" if usable else ""


def type_name(annotation: Any) -> str:
    """Return the annotation as --help shows it: `int | null`, `relu | gelu`, `list[int]`; empty for Any."""
    kind, arguments = _parts(annotation)
    if kind is Union:
        return " | ".join(filter(None, map(type_name, arguments)))
    if choices := _choices(annotation):
        return " | ".join(map(show, choices))
    if kind in (Any, type(None)):
        return "null" if kind is not Any else ""
    return re.sub(r"([A-Za-z_]\w*\.)+", "", inspect.formatannotation(annotation if arguments else kind))


def show(value: Any) -> str:
    """Return the value as it is written on the command line."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{name}:{show(item)}" for name, item in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return f"[{','.join(map(show, value))}]"
    return str(value)


def _suits_class(kind: Any, arguments: Sequence[Any], value: Any) -> bool:
    if _is_path(kind):
        return isinstance(value, str)  # YAML has no paths
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
    """Return the type without its arguments, and the arguments, of what `type Name = ...` or NewType stands for."""
    while (behind := getattr(annotation, "__value__", getattr(annotation, "__supertype__", None))) is not None:
        annotation = behind
    kind = typing.get_origin(annotation) or annotation
    return Union if kind is types.UnionType else kind, typing.get_args(annotation)


def _choices(annotation: Any) -> list[Any]:
    kind, arguments = _parts(annotation)
    return list(arguments) if kind is typing.Literal else []


def _is_list(kind: Any) -> bool:
    return isinstance(kind, type) and kind is not object and (issubclass(list, kind) or issubclass(tuple, kind))


def _is_mapping(kind: Any) -> bool:
    return isinstance(kind, type) and kind is not object and issubclass(dict, kind)


def _is_path(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, os.PathLike)


def _is_fixed(kind: Any, arguments: Sequence[Any]) -> bool:
    """Return True for a tuple with one annotation per item."""
    return kind is tuple and bool(arguments) and arguments[-1] is not Ellipsis
