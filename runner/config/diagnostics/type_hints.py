"""Checks of values from a file or the command line against type annotations, and the text of annotations."""

import inspect
import os
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Union

from runner.errors import nearest


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


def convert(annotation: Any, value: Any, parse: Callable[[str], Any]) -> Any:
    """Return the value with each unsuitable text in it replaced by `parse` of the text, if that suits."""
    if suits(annotation, value):
        return value
    kind, arguments = _parts(annotation)
    if kind is Union:
        converted = ((member, convert(member, value, parse)) for member in arguments)
        return next((found for member, found in converted if suits(member, found)), value)
    if isinstance(value, str):
        return parsed if suits(annotation, parsed := parse(value)) else value
    if isinstance(value, list) and arguments:
        has_one_each = kind is tuple and arguments[-1] is not Ellipsis and len(arguments) == len(value)
        of_items = arguments if has_one_each else [arguments[0]] * len(value)
        return [convert(of_item, item, parse) for of_item, item in zip(of_items, value, strict=True)]
    if isinstance(value, Mapping) and len(arguments) == 2:
        return {name: convert(arguments[1], item, parse) for name, item in value.items()}
    return value


def fix(annotation: Any, value: Any, default: Any = None) -> str:
    """Return the end of a message: a similar valid value, the quoted text, or the default."""
    if near := nearest(str(value), _literals(annotation)):
        return f"; did you mean {near}?"
    if isinstance(value, (bool, int, float)) and suits(annotation, str(value)):
        return f"; for the text {show(value)} type \"'{show(value)}'\""
    usable = default is not None and suits(annotation, default)
    return f"; for example {show(default)}" if usable else ""


def type_name(annotation: Any) -> str:
    """Return the annotation as --help and messages show it: `int | null`, `relu | gelu`, `list[int]`; empty for Any."""
    kind, arguments = _parts(annotation)
    if kind is Union:
        return " | ".join(filter(None, map(type_name, arguments)))
    if kind is typing.Literal:
        return " | ".join(map(show, arguments))
    if kind in (Any, type(None)):
        return "" if kind is Any else "null"
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
    if issubclass(kind, os.PathLike):
        return isinstance(value, str)  # YAML has no paths
    if kind is not object and (issubclass(list, kind) or issubclass(tuple, kind)):
        if not isinstance(value, (list, tuple)):
            return False
        if kind is tuple and arguments and arguments[-1] is not Ellipsis:  # one annotation for each item
            return len(value) == len(arguments) and all(map(suits, arguments, value))
        return not arguments or all(suits(arguments[0], item) for item in value)
    if issubclass(dict, kind) and len(arguments) == 2:
        of_keys, of_items = arguments
        return isinstance(value, Mapping) and all(suits(of_keys, k) and suits(of_items, v) for k, v in value.items())
    return isinstance(value, kind)


def _parts(annotation: Any) -> tuple[Any, tuple[Any, ...]]:
    """Return the type without its arguments, and its arguments; `type Name = ...` and NewType are resolved."""
    while (resolved := getattr(annotation, "__value__", getattr(annotation, "__supertype__", None))) is not None:
        annotation = resolved
    kind = typing.get_origin(annotation) or annotation
    return Union if kind is types.UnionType else kind, typing.get_args(annotation)


def _literals(annotation: Any) -> list[str]:
    """Return the values of a Literal, also of one in a union."""
    kind, arguments = _parts(annotation)
    if kind is Union:
        return [name for member in arguments for name in _literals(member)]
    return list(map(show, arguments)) if kind is typing.Literal else []
