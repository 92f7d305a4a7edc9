"""Why a typed `key=value` does not fit the composed configuration, and which key was meant."""

import contextlib
import dataclasses
import typing
from collections.abc import Collection
from typing import Any

from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from runner.config.diagnostics.signature import accepted_options, provided
from runner.config.diagnostics.type_hints import describe, fix, show, suits
from runner.errors import near_hint, nearest


def key_problem(cfg: DictConfig, override: Override, groups: Collection[str]) -> str | None:
    """Applies the override to `cfg` as Hydra does; what is refused comes back in words."""
    key, value, typed = override.key_or_group, override.value(), str(override.input_line).partition("=")[2]
    if override.package is not None:
        return f"no such group {key}{near_hint(key, groups)}"
    current = _select(cfg, key)
    if override.is_delete() and current is None:
        return f"no such key{near_key(key, key_names(cfg))}"
    if override.is_delete():
        return f"{key} is {show(current)}; type ~{key}" if value not in (None, current) else None
    if override.is_add() and current is not None and not isinstance(value, (dict, list)):
        return f"{key} exists already; type {key}={typed}"
    adds = override.is_add() or override.is_force_add()
    above = _value_above(cfg, key)
    under_a_value = f"{above} holds a value, not keys; type {above}={typed}"
    if above and not adds:
        return under_a_value  # before update() empties what is above, and only then fails
    try:
        OmegaConf.update(cfg, key, value, merge=True, force_add=adds)
    except (ConfigAttributeError, ConfigKeyError) as error:
        return _no_such_key(cfg, str(error.full_key) if isinstance(value, dict) else key, typed, groups)
    except OmegaConfBaseException as error:
        return under_a_value if above else _type_problem(cfg, key, value) or str(error).splitlines()[0]
    return None


def near_key(key: str, names: Collection[str], groups: Collection[str] = ()) -> str:
    """The end of a message: which of the dotted names, or of the groups, a key was meant to be."""
    dotted = key.replace("/", ".")
    parent, _, leaf = dotted.rpartition(".")
    siblings = [name for name in names if name.rpartition(".")[0] == parent]
    same_leaf = [name for name in names if name.rpartition(".")[2] == leaf]
    leaves = {name.rpartition(".")[2]: name for name in siblings} | ({} if parent else {g: g for g in groups})
    near: str | None
    if dotted in names:
        near = dotted
    elif same_leaf:  # typed without its group, or in another one
        near = same_leaf[0]
    else:
        near = leaves.get(nearest(leaf, leaves) or "")
        if near is None and not siblings:
            near = nearest(dotted, [*names, *groups])
    if near is None and parent and siblings:
        return f"; {parent} has {', '.join(leaves)}"
    return f"; did you mean {near}?" if near else ""


def key_names(cfg: DictConfig, hydras: bool = False) -> list[str]:
    """All keys dotted, those with keys of their own too; without Hydra's own unless asked for."""
    names = _dotted(OmegaConf.to_container(cfg, resolve=False))
    return [name for name in names if hydras or not f"{name}.".startswith("hydra.")]


def _no_such_key(cfg: DictConfig, key: str, typed: str, groups: Collection[str]) -> str:
    parent, _, leaf = key.rpartition(".")
    node = _select(cfg, parent) if parent else None
    options: list[str] = []
    target = None
    if isinstance(node, DictConfig) and (target := node.get("_target_")):
        with contextlib.suppress(ValueError):  # that the target is wrong is told when the rest composes
            passed = provided(parent, {"_target_": target})
            accepted = accepted_options(target)
            options = [name for name in accepted if name not in node and name not in passed]
            if not accepted and len(node) == 1:
                return f"no such key; {parent} has no options"
    if leaf in options:
        return f"the file of {parent} has no {leaf}, but {target} takes it; type +{key}={typed}"
    hint = near_key(key, key_names(cfg, hydras=key.startswith("hydra.")), groups)
    if (near := nearest(leaf, options)) and "did you mean" not in hint:
        hint = f"; did you mean +{parent}.{near}?"
    return f"no such key{'' if typed and not typed.startswith('{') else f' {key}'}{hint}"


def _value_above(cfg: DictConfig, key: str) -> str | None:
    parts = key.split(".")
    for prefix in (".".join(parts[:count]) for count in range(1, len(parts))):
        value = _select(cfg, prefix)
        if value is not None and not OmegaConf.is_config(value):
            return prefix
    return None


def _type_problem(cfg: DictConfig, key: str, value: Any) -> str | None:
    """In the words of the dataclass that types the key, if one does."""
    parent, _, leaf = key.rpartition(".")
    schema = OmegaConf.get_type(cfg, parent) if parent else OmegaConf.get_type(cfg)
    annotation = typing.get_type_hints(schema).get(leaf) if dataclasses.is_dataclass(schema) else None
    if annotation is None or suits(annotation, value):
        return None
    if dataclasses.is_dataclass(annotation):
        inner = [f"{key}.{field.name}" for field in dataclasses.fields(annotation)]
        return f"has keys of its own; type {inner[0]}=VALUE ({', '.join(inner)})"
    return f"must be {describe(annotation)}{fix(annotation, value, _select(cfg, key))}"


def _select(cfg: DictConfig, key: str) -> Any:
    """None also where it is a reference to what is not there."""
    with contextlib.suppress(OmegaConfBaseException):
        return OmegaConf.select(cfg, key, throw_on_missing=False)
    return None


def _dotted(node: Any, prefix: str = "") -> list[str]:
    names = []
    for name, value in node.items():
        if not str(name).startswith("_"):  # _target_ and the like
            names.append(f"{prefix}{name}")
            names += _dotted(value, f"{prefix}{name}.") if isinstance(value, dict) else []
    return names
