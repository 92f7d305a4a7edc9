"""What a group's node names is called with its options; what it refuses is the user's to mend."""

import inspect
import re
from collections.abc import Iterator, Mapping
from typing import Any, Generic, Protocol

from hydra.errors import InstantiationException
from hydra.utils import instantiate

from runner.config.diagnostics.signature import CALLED
from runner.errors import InputError


def make_group(choices: Mapping[str, str], key: str, node: dict[str, Any], *args: Any, **provided: Any) -> Any:
    """Call what a group's node names; a ValueError of its constructor is the user's to mend.

    A loss or scheduler with `_partial_` is a function, which the loop calls.
    """
    try:
        # A partial, because instantiate turns what it is passed besides (a data set, say) into configuration.
        constructor = instantiate({**node, "_partial_": True}, _convert_="all")
        if key in CALLED and node.get("_partial_"):
            return constructor
        return constructor(*args, **provided)
    except InputError:
        raise  # it says what was typed
    except (ValueError, InstantiationException) as error:
        nested = isinstance(error, InstantiationException)
        cause = error.__cause__ if nested else error
        if not isinstance(cause, ValueError):
            raise
        nodes = list(_nodes(key, node))[1 if nested else 0 :]
        raise InputError(_name_key(key, choices.get(key, ""), nodes, str(cause))) from None


def check_contract(made: Any, contract: type, key: str) -> None:
    """Raises InputError where what was made for a group lacks a member that the contract, a Protocol, declares."""
    declared = [
        name
        for base in contract.__mro__
        if base not in (Protocol, Generic, object)
        for name in (*inspect.get_annotations(base), *vars(base))
        if not name.startswith("_")
    ]
    if missing := [name for name in dict.fromkeys(declared) if not hasattr(made, name)]:
        raise InputError(
            f"{key}._target_={type(made).__module__}.{type(made).__qualname__}: the class lacks "
            f"{', '.join(missing)}, which {contract.__module__}.{contract.__name__} declares"
        )


def _nodes(key: str, node: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The node and those in it, each with its key."""
    yield key, node
    for name, value in node.items():
        if isinstance(value, dict):
            yield from _nodes(f"{key}.{name}", value)


def _name_key(key: str, choice: str, nodes: list[tuple[str, dict[str, Any]]], text: str) -> str:
    """A constructor's own words behind what was typed: it knows its options, but not the group they are in."""
    option = re.match(r"(\w+)[\w.]*=", text)
    for path, node in nodes:
        if option and option[1] in node:
            return f"{path}.{text}"  # `hidden=0 must be …`, `files.val=null …`
    if text.startswith(f"{key}."):
        return text
    blamed = [
        (path, name, value) for path, node in nodes for name, value in node.items() if text.endswith(f": {value}")
    ]
    if len(blamed) == 1:
        path, name, value = blamed[0]
        return f"{path}.{name}={value}: {text}"  # torch's `Invalid learning rate: -1`
    return f"{key}={choice}: {text}"
