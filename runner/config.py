"""The typed top level of the configuration, and every check of values and of how they fit together."""

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING

from runner.explain.annotations import describe, show, suits

PRECISIONS = ("fp64", "fp32", "bf16", "fp16")
MEMORY_FORMATS = ("auto", "contiguous", "channels_last")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class InputError(ValueError):
    """What the user asked for cannot be done; each message is one line with key, value, rule and fix."""

    def __init__(self, *messages: str):
        super().__init__("\n".join(messages))
        self.messages = list(messages)


@dataclass
class Checkpoints:
    """When checkpoints are taken, and how many stay."""

    every_epochs: int = 1
    every_steps: int | None = None
    keep: int = 2


@dataclass
class Comparison:
    """What task=compare measures."""

    modes: list[str] | None = None
    world_sizes: list[int] = field(default_factory=lambda: [1, 2])


@dataclass
class Reporting:
    """What task=report reads, sorts by and writes."""

    runs: list[str] = field(default_factory=list)
    metric: str | None = None
    direction: str | None = None
    output: str | None = None


@dataclass
class Config:
    """One experiment. The groups are nodes with a `_target_`, whose constructor's signature types them."""

    task: Any = MISSING
    model: Any = MISSING
    data: Any = MISSING
    parallel: Any = MISSING
    backend: Any = MISSING
    launcher: Any = MISSING
    optimizer: Any = MISSING
    scheduler: Any = MISSING
    loss: Any = MISSING
    loader: Any = MISSING
    logger: Any = MISSING
    name: str = "run"
    seed: int = 0
    epochs: int = 10
    max_steps: int | None = None
    batch_size: int = 64
    micro_batches: int = 1
    precision: str = "fp32"
    compile: bool = False
    memory_format: str = "auto"
    sync_batchnorm: Any = "auto"
    clip_grad_norm: float | None = None
    threads: int | None = None
    log_every: int = 1
    eval_every: int = 1
    checkpoint: Checkpoints = field(default_factory=Checkpoints)
    profile: bool = False
    compare: Comparison = field(default_factory=Comparison)
    report: Reporting = field(default_factory=Reporting)
    resume: str | None = None
    run: str | None = None
    outputs: str = "outputs"


ConfigStore.instance().store(name="schema", node=Config)

KEYS = tuple(f.name for f in fields(Config))
GROUPS = tuple(f.name for f in fields(Config) if f.default == MISSING)


def check_types(container: Mapping[str, Any]) -> list[str]:
    """Top-level values of a type that is not the key's; only a reference can bring one, as name=${model}."""
    types = get_type_hints(Config)
    return [
        f"{key}={show(container[key])} must be {describe(types[key])}"
        for key in KEYS
        if types[key] is not Any
        and not is_dataclass(types[key])
        and (isinstance(container[key], Mapping) or not suits(types[key], container[key]))
    ]


def check_values(config: Config) -> list[str]:
    """Every top-level value that is wrong whatever else is chosen, one message each."""
    at_least = {
        "seed": 0,
        "epochs": 1,
        "max_steps": 1,
        "batch_size": 1,
        "micro_batches": 1,
        "threads": 1,
        "log_every": 1,
        "eval_every": 1,
        "checkpoint.every_epochs": 1,
        "checkpoint.every_steps": 1,
        "checkpoint.keep": 1,
    }
    messages = []
    for key, least in at_least.items():
        value = _get(config, key)
        if value is not None and value < least:
            messages.append(f"{key}={value} must be at least {least}")
    if config.seed >= 2**63:
        messages.append(f"seed={config.seed} must be below 2**63; try seed=0")
    if config.clip_grad_norm is not None and not (0 < config.clip_grad_norm < math.inf):
        messages.append(f"clip_grad_norm={config.clip_grad_norm} must be above 0 and finite, or null; try 1.0")
    messages += _choice("precision", config.precision, PRECISIONS)
    messages += _choice("memory_format", config.memory_format, MEMORY_FORMATS)
    if config.report.direction is not None:
        messages += _choice("report.direction", config.report.direction, ("max", "min"))
    messages += _choice("sync_batchnorm", config.sync_batchnorm, ("auto", True, False))
    if not NAME.fullmatch(config.name):
        messages.append(
            f"name={config.name} must be 1 to 64 letters, digits, '.', '_' or '-', the first a letter or digit; "
            f"try name={_as_name(config.name)}"
        )
    if not config.outputs:
        messages.append("outputs= must be the path of a folder; try outputs=outputs")
    elif message := _unwritable(Path(config.outputs)):
        messages.append(f"outputs={config.outputs} {message}")
    return messages


def check_combination(config: Config, uses_gpu: bool | None) -> list[str]:
    """Every way in which sound values do not fit together, one message each; None: the device is not known yet."""
    messages = []
    if config.precision == "fp16" and uses_gpu is False:
        messages.append("precision=fp16 needs a GPU, because its gradients must be scaled; try precision=bf16")
    if config.loader["pin_memory"] and uses_gpu is False:
        messages.append("loader.pin_memory=true has no effect without a GPU; try loader.pin_memory=null")
    if config.loader["prefetch"] is not None and not config.loader["num_workers"]:
        messages.append(f"loader.prefetch={config.loader['prefetch']} needs worker processes; try loader.num_workers=2")
    if config.resume and config.run:
        messages.append(f"resume={config.resume} and run={config.run} exclude each other; drop one")
    return messages


def check_batch(config: Config, data_ranks: int, parallel_micro_batches: int = 1) -> list[str]:
    """Every rank must have a sample in each micro-batch of a full step, of which the mode may make several."""
    factors = {"data ranks": data_ranks, "micro_batches": config.micro_batches}
    if parallel_micro_batches > 1:
        factors["parallel.micro_batches"] = parallel_micro_batches
    least = math.prod(factors.values())
    if config.batch_size >= least:
        return []
    return [
        f"batch_size={config.batch_size} must be at least {' x '.join(factors)} = "
        f"{' x '.join(map(str, factors.values()))} = {least}; try batch_size={least}"
    ]


def _get(config: Config, key: str) -> Any:
    value: Any = config
    for part in key.split("."):
        value = getattr(value, part)
    return value


def _choice(key: str, value: Any, choices: tuple[Any, ...]) -> list[str]:
    from runner.explain.suggest import nearest

    if any(value is choice or (isinstance(value, str) and value == choice) for choice in choices):
        return []
    words = [str(choice).lower() for choice in choices]
    hint = nearest(str(value), words)
    return [f"{key}={value} must be one of {', '.join(words)}" + (f"; did you mean {hint}?" if hint else "")]


def _as_name(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("._-")[:64] or "run"


def _unwritable(path: Path) -> str | None:
    """Why no run can be kept under the path, without making anything there."""
    for folder in (path, *path.absolute().parents):
        if folder.exists():
            if not folder.is_dir():
                return f"must be a folder, but {folder} is a file; name another"
            if not os.access(folder, os.W_OK | os.X_OK):
                return f"must be writable, but {folder} is not; name another folder"
            return None
    return None


def as_config(container: Mapping[str, Any]) -> Config:
    """The typed configuration of a composed and resolved container."""
    values = {key: container[key] for key in KEYS}
    values["checkpoint"] = Checkpoints(**values["checkpoint"])
    values["compare"] = Comparison(**values["compare"])
    values["report"] = Reporting(**values["report"])
    return Config(**values)


def dotted(node: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The values in a node and in those that it holds, by dotted key; an empty node is a value."""
    flat: dict[str, Any] = {}
    for key, value in node.items():
        nested = isinstance(value, Mapping) and value
        flat |= dotted(value, f"{prefix}{key}.") if nested else {f"{prefix}{key}": value}
    return flat
