"""Checks of a configuration node against the signature of the constructor that its `_target_` names."""

import inspect
import types
import typing
from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import Any, Literal

from runner.config.diagnostics.import_target import locate_callable
from runner.config.diagnostics.type_hints import fix, show, suits, type_name
from runner.errors import did_you_mean

# Arguments that the runner itself passes to a group's constructor; for datasets see `provided`.
PROVIDED = {
    "loader": ("dataset", "sampler", "dtype", "device", "memory_format"),
    "objective": ("loss",),
    "optimizer": ("params",),
}
# Groups whose object is itself called, with so many arguments: a partial function can replace it.
CALLED = {"loss": 2, "scheduler": 3}
_MISSING = "???"  # OmegaConf's mark for a value that must be set
_EMPTY = inspect.Parameter.empty
HYDRA_KEYS = ("_target_", "_partial_", "_recursive_", "_args_", "_convert_")


def check_options(
    key: str, node: Mapping[str, Any], provided: Collection[str] = (), described: Collection[str] = ()
) -> list[str]:
    """Return one line per wrong option of a node, a plain container, and of the nodes in it.

    provided: arguments that the runner passes itself; the node must not contain them. described: keys that the runner
    reads from the node, allowed even if the constructor does not accept them.
    """
    messages = _check_call(key, node, provided, described) if "_target_" in node else []
    if node.get("_recursive_") is not False:  # otherwise the constructor creates the nested objects itself
        for name, value in node.items():
            messages += [] if name in described else _check_nested(f"{key}.{name}", value)
    return messages


def parameters_of(target: str) -> dict[str, inspect.Parameter]:
    """Return the constructor's named parameters, each with a type; none for a signature that Python cannot read.

    Raise ValueError if the target cannot be imported or called.
    """
    parameters = _parameters(locate_callable(target)) or {}
    return {name: parameters[name] for name in _names(parameters)}


def accepts(target: str, option: str) -> bool:
    """Return True if the constructor accepts the option, by name or by `**kwargs`. Raise as parameters_of."""
    parameters = _parameters(locate_callable(target)) or {}
    return option in _names(parameters) or _has(parameters, inspect.Parameter.VAR_KEYWORD)


def takes_optimizer(target: object) -> bool:
    """Return True for a scheduler that changes an optimizer, as those of torch.optim.lr_scheduler do."""
    with suppress(ValueError):  # a missing constructor, which check_options reports
        return isinstance(target, str) and "optimizer" in parameters_of(target)
    return False


def provided(group: str, node: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the arguments that the runner itself passes to the target of the group's node."""
    if group == "scheduler":
        return ("optimizer",) if takes_optimizer(node.get("_target_")) else ()
    if group != "data":
        return PROVIDED.get(group, ())
    try:
        option = split_option(node["_target_"]) if "_target_" in node else None
    except ValueError:  # a missing constructor, which check_options reports
        return ()
    return (option,) if option else ()


def split_option(target: str) -> str | None:
    """Return the argument that selects a dataset's split: `train` (a bool), `split` (a name), or None without one.

    If a dataset accepts both, its `split` means something else (EMNIST's letters). Raise as parameters_of.
    """
    parameters = _parameters(locate_callable(target)) or {}
    named = [name for name in ("train", "split") if name in _names(parameters)]
    if named:
        return named[0]
    return "train" if _has(parameters, inspect.Parameter.VAR_KEYWORD) else None


def literals(target: str, option: str) -> tuple[Any, ...]:
    """Return the values of the option's Literal annotation; none for another annotation. Raise as parameters_of."""
    parameter = parameters_of(target).get(option)
    annotation = parameter.annotation if parameter else None
    return typing.get_args(annotation) if typing.get_origin(annotation) is Literal else ()


def _check_call(key: str, node: Mapping[str, Any], provided: Collection[str], described: Collection[str]) -> list[str]:
    target, messages = str(node["_target_"]), []
    try:
        constructor = locate_callable(target)
    except ValueError as error:
        return [f"{key}._target_={target}: {error}"]
    parameters = _parameters(constructor)
    if parameters is None:
        return []
    called, options = getattr(constructor, "__name__", target), _names(parameters)
    is_partial = node.get("_partial_") is True  # the call passes what is missing
    required = [name for name in options if parameters[name].default is _EMPTY and name not in provided]
    choices = [name for name in options if name not in provided and not (is_partial and name in required)]
    for name, value in node.items():
        assignment = f"{key}.{name}={show(value)}"
        if name in HYDRA_KEYS or value == _MISSING:
            continue
        if name in provided:
            messages.append(f"{assignment}: the runner sets {name} itself; take it out")
        elif name in options:
            messages += _check_value(assignment, value, parameters[name])
        elif name not in described and not _has(parameters, inspect.Parameter.VAR_KEYWORD):
            hint = did_you_mean(str(name), choices) or "; it accepts none"
            messages.append(f"{assignment}: {called} has no option {name}{hint}")

    is_complete = is_partial or "_args_" in node
    missing = [] if is_complete else [name for name in required if node.get(name, _MISSING) == _MISSING]
    if inspect.isroutine(constructor) and missing and len(missing) == CALLED.get(key) and not messages:
        return [
            f"{key}._target_={target} is a function of {', '.join(missing)}; write `_partial_: true` into its file, "
            "or it would be called before they exist"
        ]
    types_of = {name: type_name(parameters[name].annotation) for name in missing}
    return messages + [f"{key}.{name} must be given{kind and f' as {kind}'}" for name, kind in types_of.items()]


def _check_nested(key: str, value: Any) -> list[str]:
    if isinstance(value, Mapping):
        return check_options(key, value, provided("scheduler", value) if key.startswith("scheduler.") else ())
    items = enumerate(value) if isinstance(value, list) else ()
    return [message for index, item in items for message in _check_nested(f"{key}.{index}", item)]


def _check_value(assignment: str, value: Any, parameter: inspect.Parameter) -> list[str]:
    default = None if parameter.default is _EMPTY else parameter.default
    annotation = parameter.annotation
    is_default = value is None and parameter.default is None  # also if the annotation lacks `| None`
    if is_default or suits(annotation, value):
        return []
    return [f"{assignment} must be {type_name(annotation)}{fix(annotation, value, default)}"]


def _parameters(constructor: Any) -> dict[str, inspect.Parameter] | None:
    """Return all parameters, each with a type; None if Python cannot read them (a class written in C)."""
    try:
        parameters = inspect.signature(constructor).parameters
    except (TypeError, ValueError):
        return None
    function = constructor
    if inspect.isclass(constructor):
        function = constructor.__new__ if constructor.__init__ is object.__init__ else constructor.__init__
    namespace = getattr(inspect.unwrap(function), "__globals__", {})
    return {name: each.replace(annotation=_annotation(each, namespace)) for name, each in parameters.items()}


def _annotation(parameter: inspect.Parameter, namespace: dict[str, Any]) -> Any:
    """Return the evaluated annotation; without one the type of the default, and Any if neither is known.

    Each annotation is evaluated by itself: if one names a type for type checkers only, the others are still checked.
    """
    annotation, implied = parameter.annotation, type(parameter.default)
    if annotation is _EMPTY:
        return implied if implied in (bool, int, float, str) else Any
    try:
        return typing.get_type_hints(types.SimpleNamespace(__annotations__={"it": annotation}), namespace)["it"]
    except Exception:  # an annotation can be any expression
        return Any


def _names(parameters: Mapping[str, inspect.Parameter]) -> list[str]:
    return [name for name, p in parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]


def _has(parameters: Mapping[str, inspect.Parameter], kind: Any) -> bool:
    return any(parameter.kind is kind for parameter in parameters.values())
