"""What differs between the configuration that a run was made with and the one that it is to go on with."""

import inspect
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from omegaconf import MISSING

from runner.config.diagnostics.import_target import locate
from runner.config.diagnostics.type_hints import show
from runner.config.recorded import read_config
from runner.config.schema import OF_TASKS, Config
from runner.runs.attempts import began_with
from runner.runs.records import dotted

# Where and how a run computes, is kept and is watched. It may change, and is not listed.
FREE: tuple[str, ...] = (
    *("task", "run", "resume", "resume_force", "trust", "name", "outputs", "split", *OF_TASKS),
    *("parallel", "backend", "launcher", "threads", "logger", "log_every", "checkpoint", "profile", "init_from"),
    "keep_samples",
    *("loader.num_workers", "loader.pin_memory", "loader.prefetch", "model.devices"),
)
# What the model, the order of the data or a step is made of. Of an optimizer that is its class, and who is in a group.
FIXED: tuple[str, ...] = (
    *("seed", "model", "data", "val_fraction", "transforms", "transform_targets", "precision", "loss", "objective"),
    *("freeze", "debug", "loader", "optimizer._target_"),
)
_TARGET = "._target_"


def changed_since(run: Path, config: Config) -> dict[str, list[Any]]:
    """What differs from what the run began with: by key, the value then and the one now."""
    before = flat(read_config(run))
    return differences(began_with(run, before), flat(config))


def refused_changes(run: Path, config: Config) -> dict[str, list[Any]]:
    """As changed_since, from the attempt that trained last: what its checkpoint cannot go on with."""
    before, now = read_config(run), config
    found = differences(flat(before), flat(now))
    refused = {key: values for key, values in found.items() if _is_under(key, FIXED) or f"{key}{_TARGET}" in FIXED}
    if "optimizer" not in found and (patterns := [_patterns(each) for each in (before, now)]) and len({*patterns}) > 1:
        refused["optimizer.groups"] = [list(each) for each in patterns]
    return refused


def shown_class(target: Any) -> Any:
    """Of a `_target_` its last part."""
    return target.rpartition(".")[2] if isinstance(target, str) else target


def flat(config: Config) -> dict[str, Any]:
    """What may matter, by dotted key; without the groups that an older version did not have."""
    values = {key: value for key, value in asdict(config).items() if value != MISSING}
    return {key: value for key, value in dotted(values).items() if not _is_under(key, FREE)}


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, list[Any]]:
    """By key. Of a group whose class is another one, the names of the classes alone."""
    known = {key.partition(".")[0] for key in before}
    keys = [key for key in dict.fromkeys((*before, *now)) if key.partition(".")[0] in known]
    found = {key: [_value(key, before, now), _value(key, now, before)] for key in keys}
    found = {key: values for key, values in found.items() if json.dumps(values[0]) != json.dumps(values[1])}
    classes = [key.removesuffix(_TARGET) for key in found if key.endswith(_TARGET)]
    chosen = {key: [shown_class(value) for value in found[f"{key}{_TARGET}"]] for key in classes}
    return chosen | {key: values for key, values in found.items() if not _is_under(key, classes)}


def _value(key: str, own: Mapping[str, Any], other: Mapping[str, Any]) -> Any:
    """Null where there is none; of an option that is not given, what the constructor takes then."""
    if key in own:
        return None if own[key] == {} else own[key]
    group, _, name = key.rpartition(".")
    target = own.get(f"{group}{_TARGET}")
    if target is None or other.get(f"{group}{_TARGET}") != target:
        return None
    try:
        default = inspect.signature(locate(target)).parameters[name].default
    except (AttributeError, ImportError, KeyError, TypeError, ValueError):
        return None
    return None if default is inspect.Parameter.empty else _plain(default)


def _plain(value: Any) -> Any:
    """A default as a record can hold it; of a class, and the like, its text."""
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    if isinstance(value, dict):
        return {str(name): _plain(inner) for name, inner in value.items()}
    return value if value is None or isinstance(value, (bool, int, float, str)) else repr(value)


def _patterns(config: Config) -> tuple[str, ...]:
    """Which parameters are in which group of the optimizer."""
    return tuple(str(group.get("match")) for group in config.optimizer.get("groups") or ())


def _is_under(key: str, names: tuple[str, ...] | list[str]) -> bool:
    return any(f"{key}.".startswith(f"{name}.") for name in names)


def told(key: str, before: Any, now: Any) -> str:
    """A line of the header."""
    return f"changed  {key} {show(before)} -> {show(now)}"
