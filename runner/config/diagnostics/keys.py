"""Explanations of keys and references that do not fit the configuration, with the key that was probably meant."""

import contextlib
import re
import typing
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.override_parser.types import Override
from hydra.errors import ConfigCompositionException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, InterpolationKeyError, OmegaConfBaseException

from runner.config.custom_dirs import option_file
from runner.config.schema import GROUPS, KEYS, Config
from runner.errors import nearest
from runner.records.settings import dotted


def key_problem(cfg: DictConfig, override: Override, groups: Collection[str]) -> str | None:
    """Let Hydra apply the override to `cfg`; return why it is refused."""
    key, text = override.key_or_group, str(override.input_line).partition("=")[2]
    is_absent = override.package is not None
    with contextlib.suppress(OmegaConfBaseException):
        is_absent |= override.is_delete() and OmegaConf.select(cfg, key, throw_on_missing=False) is None
    try:
        ConfigLoaderImpl._apply_overrides_to_config([override], cfg)
    except ConfigCompositionException as error:
        cause = error.__cause__ or error
        is_missing = isinstance(cause, (ConfigAttributeError, ConfigKeyError, InterpolationKeyError))
        if not is_absent and not is_missing:
            return one_line(cause)
        missing = str(getattr(cause, "full_key", key)) if text.startswith("{") else key
        named = f" {missing}" if missing != key else ""
        return f"no such key{named}{near_key(missing, key_names(cfg, key.startswith('hydra.')), groups)}"
    return None


def value_problem(
    cfg: DictConfig, error: OmegaConfBaseException, overrides: Sequence[str], choices: Mapping[str, str]
) -> str:
    """Return one line on a key that nothing reads, a value of a wrong type, or a reference that cannot be resolved."""
    key, reason, names = str(error.full_key or "") or _unmerged_key(cfg), one_line(error), key_names(cfg)
    given = [line for line in overrides if within(key_of(line), key) or within(key, key_of(line))]
    if isinstance(error, (ConfigAttributeError, ConfigKeyError)) and not isinstance(error, InterpolationKeyError):
        others = [name for name in (*names, *KEYS) if not within(name, key)]
        return f"{given[-1] if given else f'{key} (in a configuration file)'}: no such key{near_key(key, others)}"
    raw = dotted(typing.cast(dict[str, Any], OmegaConf.to_container(cfg, resolve=False))).get(key)
    group = key.partition(".")[0]
    file = option_file(group, choices.get(group, ""))
    source = f" in {file}" if file and key not in map(key_of, overrides) else ""
    found = re.search(r"'([^']+)'", reason) if isinstance(error, InterpolationKeyError) else None
    return f"{key}={raw}{source}: {reason}{near_key(found[1], names) if found else ''}"


def _unmerged_key(cfg: DictConfig) -> str:
    """Return the first key whose value does not have the type of the schema; OmegaConf names no list and no section."""
    for key in filter(KEYS.__contains__, map(str, cfg)):
        try:
            value = OmegaConf.select(cfg, key)
            value = OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
            OmegaConf.merge(Config, {key: value})
        except OmegaConfBaseException:
            return key
    return ""


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
        add = f"; for another option of its class type +{name}=VALUE" if parent in GROUPS else ""
        return f"; {parent} has {', '.join(siblings)}{add}"
    near = near or nearest(name, [*names, *groups])
    return f"; did you mean {near}?" if near else ""


def key_names(cfg: DictConfig, hydras: bool = False) -> list[str]:
    """Return all dotted keys, nodes included; those of Hydra only with `hydras`."""
    names: dict[str, None] = {}
    for key in dotted(typing.cast(dict[str, Any], OmegaConf.to_container(cfg, resolve=False))):
        parts = key.split(".")
        names |= dict.fromkeys(".".join(parts[: number + 1]) for number in range(len(parts)))
    return [name for name in names if "._" not in f".{name}" and (hydras or not within(name, "hydra"))]


def key_of(line: str) -> str:
    """Return the key or group of an override."""
    return line.lstrip("+~").partition("=")[0].partition("@")[0]


def within(key: str, outer: str) -> bool:
    """Return True if the dotted key is `outer` or a key in it."""
    return f"{key}.".startswith(f"{outer}.")
