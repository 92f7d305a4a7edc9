"""Comparison of the configuration that a run recorded with the current one: what changed, and if the run can resume."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from omegaconf import MISSING, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from runner.checkpoints import layout
from runner.config.diagnostics.import_target import locate
from runner.config.diagnostics.type_hints import show
from runner.config.pointers import named_directory
from runner.config.schema import (
    FIXED_ON_RESUME,
    FREE_ON_RESUME,
    GROUPS,
    KEYS,
    NAMED_GROUPS,
    SECTIONS,
    Config,
    apply_debug,
    as_config,
)
from runner.config.validate import AUTO
from runner.errors import InputError, as_input_error
from runner.records.attempts import initial_values
from runner.records.custom_code import read_code
from runner.records.frozen_code import find_frozen
from runner.records.ledger import is_sweep
from runner.records.run_directory import CHECKPOINTS
from runner.records.run_files import read_mapping
from runner.records.run_record import DONE, find_run
from runner.records.settings import CONFIG, OVERRIDES, dotted

TARGET = "_target_"
_FORCE = "keep that, or add resume_force=true"

Changes = dict[str, list[Any]]  # by dotted key, the value before and now


def read_config(run: Path) -> Config:
    """Return the resolved configuration of a run. Raise InputError if it is missing or damaged, such as truncated."""
    if not (run / CONFIG).is_file():
        raise InputError(f"{run} is no run directory: it has no {CONFIG}; name one under outputs/")
    found = read_mapping(run / CONFIG)
    container = {key: found[key] for key in KEYS if key in found}
    wrong = [
        f"{key} is not a mapping" for key in (*NAMED_GROUPS, *SECTIONS) if not isinstance(found.get(key, {}), dict)
    ]
    for key in GROUPS:
        if not isinstance(node := found.get(key), dict) or not isinstance(node.get(TARGET), str):
            wrong.append(f"{key} is not a mapping with a {TARGET}")
    if not wrong:
        groups = container["optimizer"].get("groups") or []
        if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
            wrong.append("optimizer.groups is not a list of mappings")
    wrong += [f"the key {key} is missing" for key in KEYS if key not in found]
    try:
        if not wrong:
            OmegaConf.merge(Config, container)  # checks the types
    except OmegaConfBaseException as error:
        wrong.append(" ".join(str(error).split()))
    if wrong:
        raise InputError(f"{run / CONFIG}: {wrong[0]}, so no run has written it; restore the file")
    return as_config(container)


def read_choices(run: Path) -> dict[str, str]:
    """Return the chosen options of the groups that result.json names."""
    record = find_run(run)
    choices = {"task": record.task, "model": record.model, "data": record.data, "parallel": record.parallel}
    return {group: option for group, option in choices.items() if option}


def changed_since(run: Path, config: Config) -> Changes:
    """Return the differences between the configuration with which the run started and the current one."""
    before = _relevant(read_config(run))
    return differences(initial_values(run, before), _relevant(config))


def differs_from(run: Path, config: Config) -> Changes:
    """Return the differences between the configuration of the last attempt of a run and the current one."""
    found = differences(_relevant(read_config(run)), _relevant(apply_debug(config)))
    if config.micro_batches == AUTO:  # the run has recorded the number
        found.pop("micro_batches", None)
    return found


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> Changes:
    """Return the differences of two flat configurations; if the class of a group differs, only the classes' names."""
    groups = {key.partition(".")[0] for key in before}
    keys = [key for key in dict.fromkeys((*before, *now)) if key.partition(".")[0] in groups]
    found = {key: [None if values.get(key) == {} else values.get(key) for values in (before, now)] for key in keys}
    found = {key: values for key, values in found.items() if _text(values[0]) != _text(values[1])}
    classes = {
        key.removesuffix(f".{TARGET}"): [str(value).rpartition(".")[2] for value in values]
        for key, values in found.items()
        if key.endswith(f".{TARGET}")
    }
    return classes | {key: values for key, values in found.items() if not _is_under(key, tuple(classes))}


def check_resumable(config: Config, choices: Mapping[str, str | None]) -> list[str]:
    """Return a message for each reason why the configuration cannot resume, fork or read the run that it names."""
    try:
        if config.resume:
            return _check_resumed(f"resume={config.resume}", Path(config.resume), config, choices)
        run = named_directory(config.run_id, config.name, config.local_outputs)
        if run and is_sweep(run):
            return [f"run_id={config.run_id} is a sweep; add -m to resume it, or type another run_id"]
        if run and "/" in str(config.run_id) and not is_sweep(run.parent):
            return [f"run_id={config.run_id} must name a job of a sweep, but {run.parent} is none"]
        if run and (run / OVERRIDES).is_file():
            return _check_named(run, config, choices)
        if config.fork and locate(config.task[TARGET]).trains:
            run = Path(config.fork)
            named = f"fork={run}"
            checkpoint = config.checkpoint.load
            return _check_checkpoint("fork", run, checkpoint) or _check_resumed(named, run, config, choices, checkpoint)
        if config.run and locate(config.task[TARGET]).reads_checkpoint:
            return _check_checkpoint("run", Path(config.run), config.checkpoint.load)
    except InputError as error:
        return error.messages
    except (OSError, ValueError) as error:
        return [f"fork={config.fork}: its checkpoint {config.checkpoint.load} is damaged ({error}); choose another one"]
    return []


def _check_checkpoint(key: str, run: Path, name: str) -> list[str]:
    directory = run / CHECKPOINTS
    if not layout.list_checkpoints(directory):
        return [f"{key}={run} has no checkpoint yet; train it first, without {key}="]
    if name not in (layout.LAST, layout.BEST) and not layout.STEP.fullmatch(name):
        return []  # validate.py reports it
    try:
        paths = layout.candidates(directory, name)
    except ValueError as error:
        return [f"checkpoint={name}: {error}"]
    with as_input_error(f"{key}={run}: "):
        _first_valid(paths)
    return []


def _check_named(run: Path, config: Config, choices: Mapping[str, str | None]) -> list[str]:
    """Return why the command cannot resume the run that its `run_id` names: its values must be those of the run."""
    found = {} if config.resume_force else differs_from(run, config)
    if found:
        listed = ", ".join(f"{key} is {show(now)}, and was {show(before)}" for key, (before, now) in found.items())
        return [
            f"run_id={config.run_id} names a run with another configuration: {listed}; type another run_id, or add "
            "resume_force=true to resume it with these values"
        ]
    if find_run(run).state in DONE and not config.resume_force:
        return []  # there is nothing to resume
    return _check_resumed(f"run_id={config.run_id}", run, config, choices)


def _check_resumed(
    named: str, run: Path, config: Config, choices: Mapping[str, str | None], checkpoint: str | None = None
) -> list[str]:
    """Return why the configuration cannot continue the run. checkpoint: None for its newest one."""
    messages = list[str]()
    if not config.resume_force:
        messages += _check_fixed(run, apply_debug(config), choices) + check_code(run, config.launcher)
    if checkpoint is not None:  # `_check_checkpoint` has found it
        stopped = layout.read_train_state(layout.find_checkpoint(run / CHECKPOINTS, checkpoint))
    elif (newest := _newest_state(named, run)) is None:
        return messages + _check_restart(named, run)
    else:
        stopped = newest
    if stopped.step_in_epoch and stopped.batch_size != config.batch_size and not config.resume_force:
        messages.append(
            f"batch_size={config.batch_size} cannot change in the middle of an epoch: the run stopped "
            f"{stopped.step_in_epoch} steps into one with batch_size={stopped.batch_size}; {_FORCE}"
        )
    if config.max_steps is not None and config.max_steps < stopped.step:
        messages.append(
            f"max_steps={config.max_steps} is below the {stopped.step} steps that the run has made; type at least "
            f"{stopped.step}, or max_steps=null"
        )
    epochs = stopped.epoch + (stopped.step_in_epoch > 0)
    if config.epochs < epochs:
        messages.append(f"epochs={config.epochs} is below the current epoch of the run, {epochs}; type at least that")
    return messages


def check_code(run: Path, launcher: Mapping[str, Any]) -> list[str]:
    """Return a message if code that determines the results of the run has changed since its last attempt.

    launcher: The launcher's node. The custom modules of the configuration must have been imported.
    """
    if launcher.get("code") == "frozen" and find_frozen(run):
        return []  # the job runs the frozen code
    force = "add resume_force=true"
    try:
        code = read_code(run, force)
    except InputError as error:
        return error.messages
    changed = [name for name in code.changed() if code.modules[name].decisive] if code else []
    if code is None or not changed:
        return []
    return [
        f"{run}: the code of its model, data or training has changed: {code.describe(changed)}; restore it from "
        f"{code.directory}, or {force}"
    ]


def _check_fixed(run: Path, config: Config, choices: Mapping[str, str | None]) -> list[str]:
    """Return a message for each change that the checkpoint of the last attempt does not allow."""
    before, options = read_config(run), read_choices(run)
    found = differences(_relevant(before), _relevant(config))
    refused = {
        key: values
        for key, values in found.items()
        if _is_under(key, FIXED_ON_RESUME) or f"{key}.{TARGET}" in FIXED_ON_RESUME
    }
    patterns = [
        [" ".join(str(group[key]) for key in ("match", TARGET) if key in group) for group in groups or ()]
        for groups in (each.optimizer.get("groups") for each in (before, config))
    ]
    if "optimizer" not in found and patterns[0] != patterns[1]:
        refused["optimizer.groups"] = patterns
    messages = []
    for key, values in refused.items():
        if key in options and choices.get(key) not in (None, options[key]):
            values = [options[key], choices[key]]
        messages.append(
            f"{key}={show(values[1])} cannot change when a run is resumed: the run has "
            f"{key}={show(values[0])}; {_FORCE}"
        )
    return messages


def _check_restart(named: str, run: Path) -> list[str]:
    """Return a message unless the run, which has no checkpoint, was stopped before its first one."""
    record = find_run(run)
    if record.state in DONE or (record.state == "preempted" and record.step):
        return [f"{named} is {record.state} and has no checkpoint any more; start a new run"]
    return []


def _newest_state(named: str, run: Path) -> layout.TrainState | None:
    """Return the state of the newest valid checkpoint; None without checkpoints. Raise InputError if none is valid."""
    paths = layout.list_checkpoints(run / CHECKPOINTS)
    try:
        return layout.read_train_state(_first_valid(paths[::-1])) if paths else None
    except ValueError as error:
        raise InputError(f"{named} has no valid checkpoint: {error}") from None


def _first_valid(paths: Sequence[Path]) -> Path:
    """Return the first valid checkpoint. Raise the ValueError of the first one if none is valid."""
    problems = list[ValueError]()
    for path in paths:
        try:
            layout.verify(path, shards=False)  # the hashes of the shards are compared when they are loaded
        except ValueError as error:
            problems.append(error)
        else:
            return path
    raise problems[0]


def _relevant(config: Config) -> dict[str, Any]:
    """Return the values that may matter, by dotted key."""
    values = {key: value for key, value in asdict(config).items() if value != MISSING}
    return {key: value for key, value in dotted(values).items() if not _is_under(key, FREE_ON_RESUME)}


def _text(value: Any) -> str:
    return json.dumps(value, default=str)  # YAML has more types than JSON


def _is_under(key: str, names: tuple[str, ...]) -> bool:
    return any(f"{key}.".startswith(f"{name}.") for name in names)
