"""Creation of the objects of the groups; a constructor's ValueError becomes a message that names the key."""

import inspect
import re
from collections.abc import Iterator, Mapping
from typing import Any

from hydra.errors import InstantiationException
from hydra.utils import instantiate

from runner.config.diagnostics.import_target import locate
from runner.config.diagnostics.signature import CALLED
from runner.errors import InputError
from runner.paths import SHIPPED, shipped_target


def make_group(choices: Mapping[str, str], key: str, node: dict[str, Any], *args: Any, **provided: Any) -> Any:
    """Call the target of a group's node with its options and other arguments, and raise its ValueError as InputError.

    A loss or scheduler with `_partial_` is returned uncalled, because the loop calls it. choices: the chosen option of
    each group. key: the dotted key of the node. node: a plain container without interpolations.
    """
    try:
        # A partial, because instantiate would convert further arguments, such as a dataset, to configuration.
        constructor = instantiate({**importable(node), "_partial_": True}, _convert_="all")
        if key in CALLED and node.get("_partial_"):
            return constructor
        if missing := sorted(getattr(constructor.func, "__abstractmethods__", ())):
            raise InputError(f"{key}._target_={node['_target_']}: the class lacks {', '.join(missing)}; define it")
        return constructor(*args, **provided)
    except InputError:
        raise  # its message names the key already
    except (ValueError, InstantiationException) as error:
        is_nested = isinstance(error, InstantiationException)
        cause = error.__cause__ if is_nested else error
        if not isinstance(cause, ValueError):
            raise
        nodes = list(_nodes(key, node))[1 if is_nested else 0 :]
        raise InputError(_name_key(key, choices.get(key, ""), nodes, str(cause))) from None


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


def importable(node: Any) -> Any:
    """Return a copy of the node in which each `_target_` can be imported by its path."""
    if isinstance(node, dict):
        return {
            name: _importable_target(value) if name == "_target_" and isinstance(value, str) else importable(value)
            for name, value in node.items()
        }
    return [importable(each) for each in node] if isinstance(node, list) else node


def _importable_target(target: str) -> str:
    if shipped_target(target) == target and target.partition(".")[0] in SHIPPED:
        locate(target)  # imports a custom module of this name before Hydra does, which would find the checkout's
    return shipped_target(target)


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
