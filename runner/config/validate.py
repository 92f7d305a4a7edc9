"""Checks of a configuration before anything is built or written; all problems are reported at once."""

import math
import os
import re
from collections.abc import Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any

from runner.checkpoints.layout import BEST, LAST, STEP
from runner.config.custom_dirs import option_file
from runner.config.diagnostics.import_target import locate
from runner.config.diagnostics.pattern_options import check_optimizer_groups, check_patterns
from runner.config.diagnostics.signature import check_options, provided
from runner.config.diagnostics.type_hints import show
from runner.config.schema import GROUPS, NAMED_GROUPS, OF_TASKS, RULES, SECTIONS, Config
from runner.errors import InputError, near_hint, require_packages
from runner.remote.address import Address, is_remote
from runner.remote.store import secret_options

AUTO = "auto"
# Keys that have no effect without another key, and an example of the other key.
_NEEDS = {
    "val_fold": ("val_fraction", "val_fraction=0.2"),
    "init_from.map": ("init_from.path", "init_from.path=weights.pt"),
    "init_from.strict": ("init_from.path", "init_from.path=weights.pt"),
    "ema.warmup_steps": ("ema.decay", "ema.decay=0.999"),
    "transform_targets": ("transforms", "transforms=flip_crop"),
    "early_stop.min_delta": ("early_stop.patience", "early_stop.patience=3"),
    "resume_force": ("resume|fork|run_id", "resume=last"),
    "code": ("run", "run=RUN_DIR"),
}
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")

# Attributes that a task's class must have.
TASK_FACTS = ("reads_run", "reads_checkpoint", "needs_experiment", "trains", "picks_split", "section")
# Keys that the runner itself reads from a node, and their types. Those of a dataset are interpolated by models.
DESCRIBED: dict[str, dict[str, Any]] = {
    "data": {"sample_shape": list[int], "num_outputs": int},
    "optimizer": {"groups": list},
    "scheduler": {"every": str},  # epoch or step, of a scheduler that changes an optimizer
}


def check_input(config: Config, choices: Mapping[str, str]) -> list[str]:
    """Return one message for each option that is wrong by itself; `choices` are the chosen options by group."""
    messages = list[str]()
    for group in NAMED_GROUPS:
        messages += _check_named(group, getattr(config, group))
    for group in GROUPS:
        node = getattr(config, group)
        described = DESCRIBED.get(group, {}) if group != "scheduler" or provided(group, node) else {}
        messages += check_options(group, node, provided(group, node), described)
    messages += check_patterns(config.init_from, config.freeze)
    messages += check_optimizer_groups(config.optimizer, provided("optimizer", config.optimizer))
    return messages or _check_task(config, choices)


def check_fit(config: Config, device_type: str | None) -> list[str]:
    """Return one message for each combination of valid values that does not work; `device_type` is None if unknown."""
    messages = []
    if config.precision == "fp16" and device_type == "cpu":
        messages.append("precision=fp16 needs a GPU, because its gradients must be scaled; try precision=bf16")
    if config.compile == "reduce-overhead" and device_type == "cpu":
        messages.append("compile=reduce-overhead needs a GPU, because it captures CUDA graphs; try compile=true")
    if config.tf32 != "convolutions" and (device_type == "cpu" or config.precision == "fp64"):
        reason = "without a GPU" if device_type == "cpu" else "with precision=fp64"
        messages.append(f"tf32={show(config.tf32)} has no effect {reason}; try tf32=convolutions")
    if config.cudnn_benchmark and device_type == "cpu":
        messages.append("cudnn_benchmark=true has no effect without a GPU; leave it out")
    if config.cuda_graph and device_type == "cpu":
        messages.append("cuda_graph=true needs a GPU; try cuda_graph=false")
    elif config.cuda_graph:
        messages += _check_graph(config)
    loader = config.loader  # a custom loader need not have these options
    if loader.get("pin_memory") and device_type == "cpu":
        messages.append("loader.pin_memory=true has no effect without a GPU; try loader.pin_memory=null")
    if config.keep_samples == "device":
        if loader.get("num_workers"):
            problem = "keep_samples=device selects the samples on the device, where workers cannot"
            messages.append(f"loader.num_workers={loader['num_workers']}: {problem}; try loader.num_workers=0")
        if loader.get("pin_memory") and device_type != "cpu":
            problem = "has no effect with keep_samples=device, because no batch is copied"
            messages.append(f"loader.pin_memory=true {problem}; try loader.pin_memory=null")
    for key in ("prefetch", "timeout_s"):
        if loader.get(key) is not None and "num_workers" in loader and not loader["num_workers"]:
            messages.append(f"loader.{key}={loader[key]} needs worker processes; try loader.num_workers=2")
    if config.compile and config.activation_checkpointing != "none":
        messages.append(
            f"activation_checkpointing={config.activation_checkpointing}: compile={show(config.compile)} decides by "
            "itself what is stored and what is recomputed; leave one of them out"
        )
    return messages


def _check_graph(config: Config) -> list[str]:
    """Check the options that do not work with cuda_graph=true."""
    keys = ("compile", "activation_checkpointing", "replay_every_steps", "train_metrics", "debug")
    others = {key: value for key in keys if (value := getattr(config, key)) not in (None, False, "none")}
    others |= {"precision": config.precision} if config.precision in ("fp16", "float8") else {}
    return [
        f"{key}={show(value)} does not work with cuda_graph=true; leave one of them out"
        for key, value in others.items()
    ]


def _check_named(group: str, node: Mapping[str, Any]) -> list[str]:
    """Check a group that is a mapping of names, so that several options of it can be chosen together."""
    if "_target_" in node:
        needed = f"{NAMED_GROUPS[group]} has a name; in its file write NAME: {{_target_: {node['_target_']}}}"
        return [f"{group}._target_={node['_target_']}: {needed}"]
    messages = [
        f"{group}.{name}={show(value)} must be a node with a _target_"
        for name, value in node.items()
        if not isinstance(value, Mapping) or "_target_" not in value
    ]
    if group == "metrics" and "loss" in node:
        messages.append("metrics.loss: every evaluation logs val/loss; give the metric another name")
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
    composes = (
        config.resume
        or config.fork
        or config.diff.trace
        or (config.run and (task.reads_checkpoint or task.needs_experiment))
    )
    uses_runs = task.needs_experiment or task.reads_run
    forks = bool(config.fork) and task.trains
    ignored = {
        "profile=true": config.profile and not task.trains,
        "debug=true": config.debug and not task.trains,
        f"split={config.split}": config.split != "val" and not task.picks_split,
        f"fork={config.fork}": config.fork and not forks,
        f"checkpoint={config.checkpoint.load}": config.checkpoint.load != LAST and not (task.reads_checkpoint or forks),
        "trust=true": config.trust and not composes,
        "parallel=auto": choices.get("parallel") == AUTO and hasattr(task, "run") and not task.trains,
        f"resume={config.resume}": config.resume and not uses_runs,
        f"run={config.run}": config.run and not uses_runs,
        f"run_id={config.run_id}": config.run_id and (not task.trains or task.reads_run),
    }
    for override, is_ignored in ignored.items():
        if is_ignored:
            return [f"{override} has no effect on {named}; drop it"]
    if config.run and not task.reads_run:
        return [f"run={config.run} has no effect on training; to resume that run, type resume={config.run}"]
    return []


def check_types(container: Mapping[str, Any], choices: Mapping[str, str]) -> list[str]:
    """Return a message for each top-level value of a wrong type, from a reference (name=${model}) or a file."""
    messages = []
    for group in (*GROUPS, *NAMED_GROUPS):
        node = container[group]
        if not isinstance(node, Mapping):
            fix = f"a file chooses an option by `override /{group}: OPTION`"
            messages.append(f"{group}={show(node)} must be a node; {fix}")
        elif group in GROUPS and group in choices and "_target_" not in node:
            file = option_file(group, choices[group])
            messages.append(f"{group}={choices[group]}: {file} has no _target_; write `_target_: MODULE.CLASS` into it")
    return messages


def check_values(config: Config) -> list[str]:
    """Return one message for each top-level value that is wrong whatever else is chosen."""
    checked = [rule.problem(key, attrgetter(key)(config)) for key, rule in RULES.items()]
    messages = [message for message in checked if message]
    if config.seed >= 2**63:
        messages.append(f"seed={config.seed} must be below 2**63; try seed=0")
    for key, (needed, example) in _NEEDS.items():
        is_set = any(attrgetter(each)(config) for each in needed.split("|"))
        if (value := attrgetter(key)(config)) != attrgetter(key)(Config()) and not is_set:
            either = needed.replace("|", " or ")
            messages.append(f"{key}={show(value)} has no effect without {either}; add {example}, or leave it out")
    if config.val_fold is not None and config.val_fraction:
        num_folds = 1 / config.val_fraction
        if not math.isclose(num_folds, round(num_folds), rel_tol=0.01) or config.val_fold >= round(num_folds):
            messages.append(
                f"val_fold={config.val_fold} must be below the number of folds, which must be whole and is "
                f"1 / val_fraction = {num_folds:.4g}; for five folds set val_fraction=0.2"
            )
    if config.loss_spike is not None and config.on_nonfinite == "go_on":
        messages.append(
            f"loss_spike={config.loss_spike:g} has no effect with on_nonfinite=go_on; try on_nonfinite=skip"
        )
    if (tolerance := config.export.tolerance) is not None and config.export.format in ("safetensors", "hf", "peft"):
        messages.append(
            f"export.tolerance={tolerance:g} has no effect with export.format={config.export.format}, which writes the "
            "exact weights; leave it out"
        )
    if (shard_gb := config.export.shard_gb) != Config().export.shard_gb and config.export.format != "hf":
        messages.append(f"export.shard_gb={shard_gb:g} has no effect without export.format=hf; leave it out")
    name = config.checkpoint.load
    if name not in (LAST, BEST) and not STEP.fullmatch(name):
        messages.append(f"checkpoint={name} must be last, best or step_N{near_hint(name, [LAST, BEST])}")
    sweep, _, job = (config.run_id or "").rpartition("/")  # SWEEP/JOB is a job of an existing sweep
    for key, text in (("name", config.name), ("run_id", sweep or None), ("run_id", config.run_id and job)):
        if text is not None and not NAME.fullmatch(text):
            messages.append(
                f"{key}={text} must be 1 to 64 letters, digits, '.', '_' or '-', the first a letter or digit"
            )
    if not config.outputs:
        messages.append("outputs= must be the path of a directory; try outputs=outputs")
    elif is_remote(config.outputs):
        messages.extend(_check_remote(config))
    elif (unwritable := check_outputs(config.outputs)) and not _is_remote(config.launcher):
        messages.extend(unwritable)
    return messages + _check_data_options(config)


def _check_remote(config: Config) -> list[str]:
    """Return a message for each reason why the runs cannot be mirrored to an address, without connecting to it."""
    try:
        address = Address.parse(config.outputs)
        if not isinstance(options := config.remote.options or {}, Mapping):
            raise InputError(
                f"remote.options={show(options)} must be a mapping; try remote.options={{region: us-east-1}}"
            )
        require_packages(f"outputs={config.outputs}", "remote", "obstore")
    except InputError as error:
        return error.messages
    local = check_outputs(config.local_outputs, "remote.local_dir")
    return secret_options(options, address.scheme) or local


def _check_data_options(config: Config) -> list[str]:
    """Return a message for each secret among the options with which the data is read from an address."""
    data = config.data if isinstance(config.data, Mapping) else {}
    root, options = data.get("root"), data.get("remote_options")
    if not isinstance(root, str) or not is_remote(root) or not isinstance(options, Mapping):
        return []
    key = "remote.options" if options == config.remote.options else "data.remote_options"
    return secret_options(options, Address.parse(root, "data.root").scheme, key)


def check_outputs(outputs: str, key: str = "outputs") -> list[str]:
    """Return a message unless the directory is writable, or can be created."""
    path = Path(outputs).absolute()
    existing = next(each for each in (path, *path.parents) if each.exists())
    if existing.is_dir() and os.access(existing, os.W_OK | os.X_OK):
        return []
    return [f"{key}={outputs} must be writable, but {existing} is no writable directory"]


def _is_remote(launcher: Mapping[str, Any]) -> bool:
    """Return True if the launcher is one whose processes are on other machines."""
    try:
        return bool(getattr(locate(launcher["_target_"]), "is_remote", False))
    except ValueError:  # `check_options` reports it
        return False


def check_batch(batch_size: int, micro_batches: int | str, parallel_micro_batches: int) -> list[str]:
    """Check that each micro-batch of a full step has a sample on some rank; a mode may split them further."""
    # The search for micro_batches=auto starts with one micro-batch.
    factors = {"micro_batches": 1 if micro_batches == AUTO else int(micro_batches)}
    if parallel_micro_batches > 1:
        factors["parallel.micro_batches"] = parallel_micro_batches
    least = math.prod(factors.values())
    if batch_size >= least:
        return []
    counts = f" = {' x '.join(map(str, factors.values()))}" if len(factors) > 1 else ""
    least_of = f"{' x '.join(factors)}{counts} = {least}"
    return [f"batch_size={batch_size} must be at least {least_of}; try batch_size={least}"]
