"""Explanations of keys and references that do not fit the configuration, with the key that was probably meant."""

import contextlib
import dataclasses
import re
import typing
from collections.abc import Collection, Sequence
from typing import Any

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.override_parser.types import Override
from hydra.errors import ConfigCompositionException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, InterpolationKeyError, OmegaConfBaseException

from runner.config.custom_dirs import option_file
from runner.config.diagnostics.signature import parameters_of, provided
from runner.config.diagnostics.type_hints import describe, fix, suits
from runner.errors import near_hint, nearest
from runner.records.records import dotted


def key_problem(cfg: DictConfig, override: Override, groups: Collection[str]) -> str | None:
    """Let Hydra apply the override to `cfg`; return why it is refused."""
    key, text = override.key_or_group, str(override.input_line).partition("=")[2]
    parent, current = key.rpartition(".")[0], _select(cfg, key)
    above = _select(cfg, parent) if parent else None
    if override.package is not None:
        return f"no such group {key}{near_hint(key, groups)}"
    if override.is_delete() and current is None:
        return f"no such key{near_key(key, key_names(cfg))}"
    if above is not None and not OmegaConf.is_config(above):
        return f"{parent} is a value without keys; type {parent}={text}"
    try:
        ConfigLoaderImpl._apply_overrides_to_config([override], cfg)
    except ConfigCompositionException as error:
        cause = error.__cause__
        if isinstance(cause, (ConfigAttributeError, ConfigKeyError)):
            return _no_such_key(cfg, str(cause.full_key) if text.startswith("{") else key, text, groups)
        return _type_problem(cfg, override, current) or one_line(cause or error)
    return None


def one_line(error: BaseException) -> str:
    """Return the first lines of an error of Hydra, OmegaConf or YAML, joined to one line."""
    if isinstance(error, RecursionError):
        return "a file's defaults lead back to it; one that starts from a built-in option needs another name"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    kept = [line for line in lines if not line.startswith(("object_type", "reference_type", "full_key"))]
    end = next((n for n, line in enumerate(kept) if line.startswith(("Config search path", "See https"))), 3)
    return " ".join(kept[: min(end, 3)]) or type(error).__name__


def near_key(key: str, names: Collection[str], groups: Collection[str] = ()) -> str:
    """Return the end of a message: the dotted name or group that the key was probably meant to be."""
    name = key.replace("/", ".")
    parent, _, leaf = name.rpartition(".")
    siblings = {each.rpartition(".")[2]: each for each in names if each.rpartition(".")[0] == parent}
    if not parent:
        siblings |= {group: group for group in groups}
    same_leaf = [each for each in names if each.rpartition(".")[2] == leaf]  # without its group, or in another one
    near = name if name in names else same_leaf[0] if same_leaf else siblings.get(nearest(leaf, siblings) or "")
    if near is None and parent and siblings:
        return f"; {parent} has {', '.join(siblings)}"
    near = near or nearest(name, [*names, *groups])
    return f"; did you mean {near}?" if near else ""


def key_names(cfg: DictConfig, hydras: bool = False) -> list[str]:
    """Return all dotted keys, nodes included; those of Hydra only with `hydras`."""
    names = _dotted_names(OmegaConf.to_container(cfg, resolve=False))
    return [name for name in names if hydras or not f"{name}.".startswith("hydra.")]


def without_target(cfg: DictConfig, groups: Collection[str]) -> list[str]:
    """Return one line for each group whose option names no class."""
    nodes: Any = OmegaConf.to_container(cfg, resolve=False)
    return [
        f"{group}={_choice(cfg, group)}: {_file(cfg, group)} has no _target_; write `_target_: MODULE.CLASS` into it"
        for group in groups
        if isinstance(nodes.get(group), dict) and "_target_" not in nodes[group]
    ]


def reference_problem(cfg: DictConfig, error: OmegaConfBaseException, overrides: Sequence[str]) -> str:
    """Return one line: the key whose reference cannot be resolved, its file, and the reason."""
    key = str(error.full_key or "")
    raw = dotted(typing.cast(dict[str, Any], OmegaConf.to_container(cfg, resolve=False))).get(key)
    is_override = any(line.lstrip("+").partition("=")[0] == key for line in overrides)
    place = "" if is_override else f" in {_file(cfg, key.split('.')[0])}"
    subject = f"{key}={raw}{place}" if raw is not None else key
    reason = str(error).splitlines()[0]
    if reason.startswith(("Recursive", "Interpolation to parent")):
        return f"{subject}: refers back to itself; give it a value"
    if isinstance(error, InterpolationKeyError) and (found := re.search(r"'([^']+)'", reason)):
        return f"{subject}: there is no {found[1]}{near_key(found[1], key_names(cfg))}"
    return f"{subject}: {reason}"


def _no_such_key(cfg: DictConfig, key: str, text: str, groups: Collection[str]) -> str:
    parent, _, leaf = key.rpartition(".")
    node = _select(cfg, parent) if parent else None
    target = node.get("_target_") if isinstance(node, DictConfig) else None
    options: list[str] = []  # of the constructor, which the file does not contain
    with contextlib.suppress(ValueError):  # a wrong target is reported once the rest composes
        passed = provided(parent, {"_target_": target})
        options = [name for name in parameters_of(target) if name not in passed] if target else []
    if leaf in options:
        value = "VALUE" if text.startswith("{") else text
        return f"the file of {parent} has no {leaf}, but {target} takes it; type +{key}={value}"
    names = [*key_names(cfg, hydras=key.startswith("hydra.")), *(f"{parent}.{name}" for name in options)]
    return f"no such key{f' {key}' if text.startswith('{') else ''}{near_key(key, dict.fromkeys(names), groups)}"


def _type_problem(cfg: DictConfig, override: Override, current: Any) -> str | None:
    """Return the rule by the dataclass that types the key, if one does."""
    parent, _, leaf = override.key_or_group.rpartition(".")
    schema = OmegaConf.get_type(cfg, parent) if parent else OmegaConf.get_type(cfg)
    annotation = typing.get_type_hints(schema).get(leaf) if dataclasses.is_dataclass(schema) else None
    if annotation is None or override.is_add() or suits(annotation, override.value()):
        return None
    if dataclasses.is_dataclass(annotation):
        inner = [f"{override.key_or_group}.{field.name}" for field in dataclasses.fields(annotation)]
        return f"is a section; type {inner[0]}=VALUE ({', '.join(inner)})"
    return f"must be {describe(annotation)}{fix(annotation, override.value(), current)}"


def _select(cfg: DictConfig, key: str) -> Any:
    """Return the value; None also for a reference that cannot be resolved."""
    with contextlib.suppress(OmegaConfBaseException):
        return OmegaConf.select(cfg, key, throw_on_missing=False)
    return None


def _dotted_names(node: Any, prefix: str = "") -> list[str]:
    names = []
    for name, value in node.items():
        if not str(name).startswith("_"):  # _target_ and the like
            names.append(f"{prefix}{name}")
            names += _dotted_names(value, f"{prefix}{name}.") if isinstance(value, dict) else []
    return names


def _choice(cfg: DictConfig, group: str) -> str:
    """Return the chosen option, which the configuration of a sweep's job lacks."""
    return str(cfg.hydra.runtime.choices.get(group)) if "hydra" in cfg else "OPTION"


def _file(cfg: DictConfig, group: str) -> str:
    return option_file(group, _choice(cfg, group)) or "its file"
