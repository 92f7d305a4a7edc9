"""Checks a node of the configuration against the constructor that its `_target_` names, before anything runs."""

import inspect
import types
import typing
from collections.abc import Collection, Mapping
from typing import Any, Literal

from runner.config.diagnostics.import_target import locate_callable
from runner.config.diagnostics.type_hints import as_typed, describe, fix, show_quoted, suits
from runner.errors import did_you_mean

# What the runner itself passes to a group's constructor, beside the options; to data, see `provided`.
PROVIDED = {
    "loader": ("dataset", "sampler", "precision", "device", "memory_format", "cuts_empty"),
    "objective": ("loss",),
    "optimizer": ("params",),
}
# Groups whose object is called itself, with so many arguments: a function stands for it as a partial one.
CALLED = {"loss": 2, "scheduler": 3}
_MISSING = "???"  # OmegaConf's mark of a value that has to be given
_EMPTY = inspect.Parameter.empty
_HYDRAS_OWN: dict[str, Any] = {
    "_target_": str,
    "_partial_": bool,
    "_recursive_": bool,
    "_args_": list,
    "_convert_": Literal["none", "partial", "object", "all"],
}


def check_options(
    key: str, node: Mapping[str, Any], provided: Collection[str] = (), described: Collection[str] = ()
) -> list[str]:
    """One line per wrong option of `node`, a plain resolved container at `key`; nested nodes are checked too.

    provided: what the runner passes itself, which the node need not and may not hold.
    described: what the runner reads from the node itself, allowed beside the constructor's own options.
    """
    messages = _check_call(key, node, provided, described) if "_target_" in node else []
    # With _recursive_ off the constructor makes the nested nodes itself, and may pass what they lack.
    completed_later = node.get("_recursive_") is False
    for name, value in node.items():
        messages += _check_nested(f"{key}.{name}", value, completed_later)
    return messages


def accepted_options(target: str) -> list[str]:
    """The options that the constructor's signature names. Raises ValueError where there is no such constructor."""
    return _names(_parameters(locate_callable(target)) or {})


def accepts(target: str, option: str) -> bool:
    """Whether the constructor takes the option, by name or by `**kwargs`. Raises ValueError as accepted_options."""
    parameters = _parameters(locate_callable(target)) or {}
    return option in _names(parameters) or _has(parameters, inspect.Parameter.VAR_KEYWORD)


def provided(group: str, node: Mapping[str, Any]) -> tuple[str, ...]:
    """What the runner itself passes to what the group's node names."""
    if group != "data":
        return PROVIDED.get(group, ())
    try:
        option = split_option(node["_target_"]) if "_target_" in node else None
    except ValueError:  # there is no such constructor, which is told elsewhere
        return ()
    return (option,) if option else ()


def split_option(target: str) -> str | None:
    """How a data set is told which split to be: `train`, true or false, or `split`, a name; None: it is not told.

    One that takes both has a `split` of another kind (EMNIST's letters). Raises ValueError as accepted_options.
    """
    parameters = _parameters(locate_callable(target)) or {}
    named = [name for name in ("train", "split") if name in _names(parameters)]
    if named:
        return named[0]
    return "train" if _has(parameters, inspect.Parameter.VAR_KEYWORD) else None


def literals(target: str, option: str) -> tuple[Any, ...]:
    """The values that the option's annotation lists, none where it is no Literal. Raises as accepted_options."""
    parameter = (_parameters(locate_callable(target)) or {}).get(option)
    annotation = parameter.annotation if parameter else None
    return typing.get_args(annotation) if typing.get_origin(annotation) is Literal else ()


def _check_call(key: str, node: Mapping[str, Any], provided: Collection[str], described: Collection[str]) -> list[str]:
    messages = [
        f"{key}.{name}={show_quoted(node[name])} must be {describe(annotation)}{fix(annotation, node[name])}"
        for name, annotation in _HYDRAS_OWN.items()
        if name in node and not suits(annotation, node[name])
    ]
    if messages:
        return messages
    target = node["_target_"]
    try:
        constructor = locate_callable(target)
    except ValueError as error:
        return [f"{key}._target_={target}: {error}"]
    parameters = _parameters(constructor)
    if parameters is None:
        return []
    called = getattr(constructor, "__name__", target)

    positional = [p.name for p in parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    arguments = node.get("_args_", [])
    if len(arguments) > len(positional) and not _has(parameters, inspect.Parameter.VAR_POSITIONAL):
        return [f"{key}._args_={show_quoted(arguments)}: {called} takes at most {len(positional)}; take some out"]
    given: dict[str, Any] = dict(zip(positional, arguments, strict=False))

    options = _names(parameters)
    partial = node.get("_partial_") is True  # what it lacks is passed when it is called
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    required = [name for name, p in parameters.items() if p.default is _EMPTY and p.kind not in variadic]
    choices = [name for name in options if name not in provided and not (partial and name in required)]
    for name, value in node.items():
        if name in _HYDRAS_OWN:
            continue
        typed = f"{key}.{name}={show_quoted(value)}"
        if name in provided:
            messages.append(f"{typed}: the runner sets {name} itself; take it out")
        elif name in options:
            given[name] = value
        elif name not in described and not _has(parameters, inspect.Parameter.VAR_KEYWORD):
            hint = did_you_mean(str(name), choices) or "; it takes none"
            messages.append(f"{typed}: {called} has no option {name}{hint}")

    lacking = [name for name in required if name not in given and name not in provided]
    if inspect.isroutine(constructor) and not partial and len(lacking) == CALLED.get(key) and not messages:
        return [
            f"{key}._target_={target} is a function of {', '.join(lacking)}; write `_partial_: true` into its file, "
            "or it would be called before there are any"
        ]
    for name, parameter in parameters.items():
        if name in given:
            messages += _check_value(f"{key}.{name}", given[name], parameter)
        elif name in required and name not in provided and not partial:
            messages += _check_value(f"{key}.{name}", _MISSING, parameter)
    return messages


def _check_nested(key: str, value: Any, completed_later: bool) -> list[str]:
    if isinstance(value, Mapping):
        partial = completed_later and "_target_" in value
        return check_options(key, {**value, "_partial_": True} if partial else value)
    items = enumerate(value) if isinstance(value, list) else ()
    return [message for index, item in items for message in _check_nested(f"{key}.{index}", item, completed_later)]


def _check_value(path: str, value: Any, parameter: inspect.Parameter) -> list[str]:
    annotation, default = parameter.annotation, parameter.default
    if annotation is _EMPTY:
        annotation = type(default) if type(default) in (bool, int, float, str) else Any
    if default is _EMPTY:
        default = None
    elif value is None and default is None:
        return []
    if isinstance(value, str) and value == _MISSING:
        rule = "" if annotation is Any else f"; it is {describe(annotation)}"
        example = as_typed(annotation)
        return [f"{path} must be given{rule}" + (f", for example {path}={example}" if example else "")]
    if suits(annotation, value):
        return []
    return [f"{path}={show_quoted(value)} must be {describe(annotation)}{fix(annotation, value, default)}"]


def _parameters(constructor: Any) -> dict[str, inspect.Parameter] | None:
    """The parameters, annotations evaluated; None where Python cannot tell (a class written in C)."""
    try:
        parameters = inspect.signature(constructor).parameters
    except (TypeError, ValueError):
        return None
    function = constructor
    if inspect.isclass(constructor):
        function = constructor.__new__ if constructor.__init__ is object.__init__ else constructor.__init__
    namespace = getattr(inspect.unwrap(function), "__globals__", {})
    return {name: p.replace(annotation=_evaluated(p.annotation, namespace)) for name, p in parameters.items()}


def _evaluated(annotation: Any, namespace: dict[str, Any]) -> Any:
    """Each by itself, so that one that names a type for type checkers only leaves the others checked."""
    if annotation is _EMPTY:
        return annotation
    try:
        return typing.get_type_hints(types.SimpleNamespace(__annotations__={"it": annotation}), namespace)["it"]
    except Exception:  # an annotation can be any expression
        return Any


def _names(parameters: Mapping[str, inspect.Parameter]) -> list[str]:
    return [name for name, p in parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]


def _has(parameters: Mapping[str, inspect.Parameter], kind: Any) -> bool:
    return any(parameter.kind is kind for parameter in parameters.values())
