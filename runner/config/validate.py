"""Everything that can be said about a configuration before anything is built or written, all failures at once."""

import math
import os
import re
from collections.abc import Mapping
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

from runner.config.diagnostics.beginning import check_beginning
from runner.config.diagnostics.import_target import locate
from runner.config.diagnostics.optimizer_groups import check_optimizer_groups
from runner.config.diagnostics.signature import check_options, provided
from runner.config.diagnostics.type_hints import describe, show, suits
from runner.config.schema import GROUPS, KEYS, NAMED_GROUPS, OF_TASKS, SECTIONS, SPLITS, Averaging, Config
from runner.config.strangers import check_trust
from runner.errors import near_hint
from runner.runs.train_state import BEST, LAST, STEP

PRECISIONS = ("fp64", "fp32", "bf16", "fp16")
MEMORY_FORMATS = ("auto", "contiguous", "channels_last")
EXPORT_FORMATS = ("safetensors", "torch_export", "onnx")
PREDICT_FORMATS = ("csv", "parquet", "npy")
AUTO = "auto"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")

# That a task's class declares.
TASK_FACTS = ("reads_run", "reads_checkpoint", "needs_experiment", "trains", "picks_split", "section")
# What the runner reads from a node by itself. Of a data set's, models interpolate it, and its constructor may take it.
DESCRIBED = {"data": ("sample_shape", "num_outputs"), "optimizer": ("groups",)}


def check_input(config: Config, choices: Mapping[str, str]) -> list[str]:
    """What is wrong with each value by itself, one message each: no other choice could make it right.

    choices: the option taken of each group.
    """
    messages = check_values(config)
    for group in NAMED_GROUPS:
        messages += _check_named(group, getattr(config, group), choices)
    for group in GROUPS:
        node = getattr(config, group)
        messages += check_options(group, node, provided(group, node), DESCRIBED.get(group, ()))
    messages += check_beginning(config) + check_trust(config.trust)
    messages += check_optimizer_groups(config.optimizer, provided("optimizer", config.optimizer))
    return messages or _check_task(config, choices)


def check_fit(config: Config, device_type: str | None) -> list[str]:
    """Every way in which sound values do not fit together, one message each; None: the device is not known yet."""
    messages = []
    if config.precision == "fp16" and device_type == "cpu":
        messages.append("precision=fp16 needs a GPU, because its gradients must be scaled; try precision=bf16")
    if config.loader["pin_memory"] and device_type == "cpu":
        messages.append("loader.pin_memory=true has no effect without a GPU; try loader.pin_memory=null")
    if config.loader["prefetch"] is not None and not config.loader["num_workers"]:
        messages.append(f"loader.prefetch={config.loader['prefetch']} needs worker processes; try loader.num_workers=2")
    if config.compile and config.activation_checkpointing != "none":
        messages.append(
            f"activation_checkpointing={config.activation_checkpointing}: compile=true chooses by itself what it keeps "
            "and what it computes again; leave one of them out"
        )
    if config.resume and config.run:
        messages.append(f"resume={config.resume} and run={config.run} exclude each other; drop one")
    return messages


def _check_named(group: str, node: Mapping[str, Any], choices: Mapping[str, str]) -> list[str]:
    """The group is a mapping of names, so that several options of it can be chosen together."""
    # A single logger needs no name, as it had none when there could be one only; a list is in no choice of Hydra's.
    if group == "logger" and "_target_" in node and (group in choices or not choices):
        return check_options(group, node)
    if "_target_" in node:
        return [
            f"{group}._target_={node['_target_']}: {NAMED_GROUPS[group]} has a name; in its file write NAME: "
            f"{{_target_: {node['_target_']}}}"
        ]
    messages = [
        f"{group}.{name}={show(value)} must be a node with a _target_; "
        f"in its file write {name}: {{_target_: MODULE.CLASS}}"
        for name, value in node.items()
        if not isinstance(value, Mapping) or "_target_" not in value
    ]
    if group == "metrics" and "loss" in node:
        messages.append("metrics.loss: every evaluation gives val/loss; give the metric another name")
    return messages or check_options(group, node)


def _check_task(config: Config, choices: Mapping[str, str]) -> list[str]:
    task = locate(config.task["_target_"])
    named = f"task={choices.get('task', task.__name__.lower())}"
    if missing := [name for name in TASK_FACTS if not hasattr(task, name)]:
        return [f"task._target_={config.task['_target_']}: the class lacks {', '.join(missing)}"]
    if task.reads_run and config.resume:
        return [f"resume={config.resume} continues training; to read a run, type run={config.resume}"]
    if task.reads_run and not config.run and not config.report.runs:
        return [f"{named} needs the run to read; type run=last, or run=RUN_DIR"]
    for section in OF_TASKS:
        default = SECTIONS[section]()
        if (given := getattr(config, section)) != default and task.section != section:
            names = [f"{section}.{key}" for key, value in vars(given).items() if value != getattr(default, key)]
            return [f"{' and '.join(names)}: no effect without task={section}; add it, or leave the key out"]
    if config.profile and not task.trains:
        return [f"profile=true has no effect on {named}; drop it, or profile the training"]
    if config.debug and not task.trains:
        return [f"debug=true has no effect on {named}; drop it, or debug the training"]
    if config.split != "val" and not task.picks_split:
        return [
            f"split={config.split} has no effect on {named}; drop it, or type task=evaluate run=RUN_DIR "
            f"split={config.split}"
        ]
    if config.checkpoint.load != LAST and not task.reads_checkpoint:
        return [
            f"checkpoint={config.checkpoint.load} has no effect on {named}; drop it, or type task=evaluate run=RUN_DIR "
            f"checkpoint={config.checkpoint.load}"
        ]
    if config.resume_force and not config.resume:
        return ["resume_force=true has no effect without resume=; drop it"]
    composes = config.resume or (config.run and (task.reads_checkpoint or task.needs_experiment))
    if config.trust is not None and not composes:
        return [f"trust={show(config.trust)} has no effect on {named}, which runs no code of another run; drop it"]
    going_on = {key: value for key, value in (("resume", config.resume), ("run", config.run)) if value}
    if going_on and not (task.needs_experiment or task.reads_run):
        (key, value), *_ = going_on.items()
        return [f"{key}={value} has no effect on {named}; drop it"]
    if config.run and not task.reads_run:
        return [f"run={config.run} has no effect on training; to resume that run, type resume={config.run}"]
    return []


def check_types(container: Mapping[str, Any]) -> list[str]:
    """Top-level values of a type that is not the key's: by a reference, as name=${model}, or a group's by a file."""
    types = get_type_hints(Config)
    return [
        f"{group}={show(container[group])} must be a node; a file chooses an option by `override /{group}: OPTION`"
        for group in (*GROUPS, *NAMED_GROUPS)
        if not isinstance(container[group], Mapping)
    ] + [
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
        "eval_every_steps": 1,
        "eval_batches": 1,
        "ema.warmup_steps": 0,
        "checkpoint.every_epochs": 1,
        "checkpoint.every_steps": 1,
        "checkpoint.keep": 1,
        "checkpoint.keep_best": 0,
        "early_stop.patience": 1,
        "early_stop.min_delta": 0,
        "export.tolerance": 0,
        "predict.batch_size": 1,
    }
    messages = []
    if config.micro_batches == AUTO:
        del at_least["micro_batches"]
    elif type(config.micro_batches) is not int:
        return [f"micro_batches={show(config.micro_batches)} must be an integer (int) or auto; for example 1"]
    for key, least in at_least.items():
        value = _get(config, key)
        if value is not None and value < least:
            messages.append(f"{key}={value} must be at least {least}")
    if config.seed >= 2**63:
        messages.append(f"seed={config.seed} must be below 2**63; try seed=0")
    if config.clip_grad_norm is not None and not (0 < config.clip_grad_norm < math.inf):
        messages.append(f"clip_grad_norm={config.clip_grad_norm} must be above 0 and finite, or null; try 1.0")
    if (seconds := config.checkpoint.every_seconds) is not None and not 0 < seconds < math.inf:
        messages.append(f"checkpoint.every_seconds={seconds:g} must be above 0 and finite, or null; try 600")
    messages += _check_average(config.ema)
    messages += _choice("on_nonfinite", config.on_nonfinite, ("stop", "skip", "go_on"))
    if (factor := config.loss_spike) is not None:
        if not 1 < factor < math.inf:
            messages.append(f"loss_spike={factor:g} must be above 1 and finite, or null; try 10")
        if config.on_nonfinite == "go_on":
            messages.append(f"loss_spike={factor:g} has no effect with on_nonfinite=go_on; try on_nonfinite=skip")
    if config.val_fraction is not None and not 0 < config.val_fraction < 1:
        messages.append(f"val_fraction={config.val_fraction} must be above 0 and below 1, or null; try 0.1")
    messages += _choice("split", config.split, SPLITS)
    messages += _choice("transform_targets", config.transform_targets, ("auto", True, False))
    if config.transform_targets != "auto" and not config.transforms:
        value = show(config.transform_targets)
        messages.append(f"transform_targets={value} has no effect without transforms; add transforms=flip_crop, say")
    messages += _choice("precision", config.precision, PRECISIONS)
    messages += _choice("memory_format", config.memory_format, MEMORY_FORMATS)
    messages += _choice("export.format", config.export.format, EXPORT_FORMATS)
    messages += _choice("predict.format", config.predict.format, PREDICT_FORMATS)
    if (tolerance := config.export.tolerance) is not None and config.export.format == "safetensors":
        messages.append(
            f"export.tolerance={tolerance:g} has no effect with export.format=safetensors, whose weights are compared "
            "to the bit; leave it out"
        )
    for key in ("report.direction", "monitor_direction"):
        if (direction := _get(config, key)) is not None:
            messages += _choice(key, direction, ("max", "min"))
    extent = config.activation_checkpointing
    if extent not in ("none", "full") and (type(extent) is not int or extent < 1):
        messages.append(
            f"activation_checkpointing={show(extent)} must be none, full or n of at least 1, for every nth "
            "block; try full"
        )
    if config.early_stop.min_delta and config.early_stop.patience is None:
        messages.append(
            f"early_stop.min_delta={config.early_stop.min_delta:g} has no effect without early_stop.patience; add "
            "early_stop.patience=3, say"
        )
    name = config.checkpoint.load
    if name not in (LAST, BEST) and not STEP.fullmatch(name):
        messages.append(f"checkpoint={name} must be last, best or step_N{near_hint(name, [LAST, BEST])}")
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


def _check_average(ema: Averaging) -> list[str]:
    if ema.decay is None:
        if ema.warmup_steps:
            return [
                f"ema.warmup_steps={ema.warmup_steps} has no effect without ema.decay; add ema.decay=0.999, or "
                "ema.warmup_steps=0"
            ]
        return []
    if not 0 < ema.decay < 1:
        return [f"ema.decay={ema.decay:g} must be above 0 and below 1, or null; try 0.999"]
    if ema.warmup_steps > 0 and 2 / (ema.warmup_steps + 1) >= ema.decay:
        return [
            f"ema.warmup_steps={ema.warmup_steps} has no effect: the decay of its first step, 2 / "
            f"({ema.warmup_steps} + 1), is not below ema.decay={ema.decay:g}; try {math.ceil(2 / ema.decay + 9)}, or 0"
        ]
    return []


def check_batch(config: Config, data_ranks: int, parallel_micro_batches: int = 1) -> list[str]:
    """Every rank must have a sample in each micro-batch of a full step, of which the mode may make several."""
    # auto begins with one.
    factors = {"data ranks": data_ranks, "micro_batches": 1 if config.micro_batches == AUTO else config.micro_batches}
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
    if any(value is choice or (isinstance(value, str) and value == choice) for choice in choices):
        return []
    words = [str(choice).lower() for choice in choices]
    return [f"{key}={value} must be one of {', '.join(words)}{near_hint(str(value), words)}"]


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
