"""Creation of the objects of the configuration's nodes; a constructor's ValueError becomes a message with the key."""

import copy
import functools
import inspect
import re
from collections.abc import Iterator, Mapping
from typing import Any

from runner.config.diagnostics.import_target import locate_callable
from runner.config.diagnostics.signature import CALLED, HYDRA_KEYS
from runner.errors import InputError


def create(value: Any) -> Any:
    """Return a copy of the value in which an object replaces each node that has a `_target_`.

    Stands in for `hydra.utils.instantiate`: `_args_`, `_partial_` and `_recursive_` have the same meaning. value: a
    plain container without interpolations. Raises ValueError for a target that cannot be imported.
    """
    if isinstance(value, list):
        return [create(each) for each in value]
    if not isinstance(value, dict):
        return value
    if "_target_" not in value:
        return {name: create(each) for name, each in value.items()}
    constructor = _bind(value)
    return constructor if value.get("_partial_") else constructor()


def _bind(node: Mapping[str, Any]) -> "functools.partial[Any]":
    """Return the target of a node with the node's options, in which the nested nodes have been created."""
    copied = copy.deepcopy if node.get("_recursive_") is False else create
    options = {name: copied(value) for name, value in node.items() if name not in HYDRA_KEYS}
    return functools.partial(locate_callable(node["_target_"]), *copied(node.get("_args_", [])), **options)


def make_group(choices: Mapping[str, str], key: str, node: dict[str, Any], *args: Any, **provided: Any) -> Any:
    """Call the target of a group's node with its options and other arguments, and raise its ValueError as InputError.

    A loss or scheduler with `_partial_` is returned uncalled, because the loop calls it. choices: the chosen option of
    each group. key: the dotted key of the node. node: a plain container without interpolations.
    """
    nodes = list(_nodes(key, node))
    try:
        constructor = _bind(node)
    except ValueError as error:  # of a nested node
        raise InputError(_name_key(key, choices.get(key, ""), nodes[1:], str(error))) from None
    if key in CALLED and node.get("_partial_"):
        return constructor
    if missing := sorted(getattr(constructor.func, "__abstractmethods__", ())):
        raise InputError(f"{key}._target_={node['_target_']}: the class lacks {', '.join(missing)}; define it")
    try:
        return constructor(*args, **provided)
    except InputError:
        raise  # its message names the key already
    except ValueError as error:
        raise InputError(_name_key(key, choices.get(key, ""), nodes, str(error))) from None


def check_contract(instance: Any, contract: type, key: str) -> None:
    """Raise InputError if a group's object lacks a member that its contract declares."""
    declared: dict[str, Any] = {}
    for base in contract.__mro__:
        declared |= {**inspect.get_annotations(base), **vars(base)}
    if missing := [name for name in declared if name[0] != "_" and not hasattr(instance, name)]:
        raise InputError(
            f"{key}._target_={type(instance).__module__}.{type(instance).__qualname__}: the class lacks "
            f"{', '.join(missing)}, which {contract.__module__}.{contract.__name__} declares"
        )


def _nodes(key: str, node: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the node and the nodes in it, each with its dotted key."""
    yield key, node
    for name, value in node.items():
        if isinstance(value, dict):
            yield from _nodes(f"{key}.{name}", value)


def _name_key(key: str, choice: str, nodes: list[tuple[str, dict[str, Any]]], text: str) -> str:
    """Return a constructor's message with the full key: the constructor knows its options, but not their group."""
    option = re.match(r"(\w+)[\w.]*=", text)  # `hidden=0 must be …`, `files.val=null …`
    for path, node in nodes:
        if option and option[1] in node:
            return f"{path}.{text}"
    if text.startswith(f"{key}."):
        return text
    options = [(path, name, value) for path, node in nodes for name, value in node.items()]
    blamed = [f"{path}.{name}={value}" for path, name, value in options if text.endswith(f": {value}")]
    subject = blamed[0] if len(blamed) == 1 else f"{key}={choice}"  # torch's `Invalid learning rate: -1`
    return f"{subject}: {text}"
