"""Checks of run directories of other users. Without `trust=`, their records may set only harmless values."""

import fnmatch
import functools
import os
import pwd
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, IntervalSweep, QuotedString, RangeSweep
from hydra.errors import HydraException

from runner.config.schema import GROUPS, KEYS, NAMED_GROUPS, Config
from runner.errors import InputError
from runner.paths import CONF
from runner.records.custom_code import find_code, targets
from runner.records.frozen_code import ARCHIVE
from runner.records.result import RESULT
from runner.records.run_directory import CONFIG, OVERRIDES

_TARGET = re.compile(r"^\s*_target_:\s*(\S+)", re.MULTILINE)
_CHOSEN_BY_NAME = {*GROUPS, *NAMED_GROUPS, "experiment"}
# Keys that choose where results are written. Their values in an untrusted record are ignored or refused.
_LOCATIONS = ("name", "outputs", "export.output", "predict.output", "report.output")
# Keys whose numbers, booleans and null are refused. For all other keys, these values are harmless.
_REFUSED = (
    *("hydra", "trust", "resume_force", "code", "run", "resume", "launcher", "logger", "parallel.allow_network"),
    *("init_from.path", "init_from.map", *_LOCATIONS),
)
_COUNTS = ("nodes", "node_rank", "nproc_per_node", "gpus_per_node", "cpus_per_node", "max_restarts", "join_timeout_s")
_NUMBERS = (*(f"launcher.{name}" for name in _COUNTS), "logger.*.images")  # exceptions from _REFUSED
# Keys whose strings cannot name code, a file, a host or a command.
_TEXTS = (
    *("precision", "memory_format", "sync_batchnorm", "activation_checkpointing", "micro_batches", "on_nonfinite"),
    *("monitor", "monitor_direction", "split", "transform_targets", "checkpoint.load", "export.format"),
    *("predict.format", "report.metric", "report.direction", "backend.name", "backend.device", "data.kind"),
    *("data.unit", "parallel.schedule", "parallel.balance", "parallel.comm_hook", "parallel.updates"),
    *("parallel.forward", "parallel.rest", "metrics.*.average", "metrics.*.ignore_index", "metrics.*.class_dim"),
)
_KEY, _TEXT = re.compile(r"[A-Za-z]\w*(\.[A-Za-z0-9]\w*)*"), re.compile(r"[\w./+-]*")
_MAX_LENGTH = 2000  # characters of an override
_FIX = "review these entries; if you trust them, add trust=true"


def check_overrides(
    named: str,
    run: Path,
    overrides: Sequence[str],
    config_dirs: Sequence[str],
    trust: Any,
    files: Sequence[str] = (OVERRIDES,),
) -> list[str]:
    """Return the overrides. For an untrusted directory, omit those that choose where results are written.

    Raise InputError if an untrusted directory names code, or sets values other than built-in options, numbers and a few
    strings. `named` is how the command names the directory, as run=DIR; `files` are those that contain the overrides.
    """
    user = untrusted_owner(run, trust, files)
    if user is None:
        return list(overrides)
    if config_dirs:
        raise InputError(_refusal(named, user, files[0], f"--config-dir={config_dirs[0]}"))
    kept = [each for each in overrides if each.partition("=")[0] not in _LOCATIONS]
    for each in kept:
        if not _is_harmless(each):
            raise InputError(
                f"{named} belongs to {user}, and its {files[0]} sets {each[:200]}, which could name code, a command, a "
                f"file or a host; {_FIX}"
            )
    return kept


def check_targets(run: Path, config: Config, trust: bool) -> None:
    """Raise InputError if another user's config.yaml names a class that no built-in option of the group names."""
    user = untrusted_owner(run, trust)
    if user is None:
        return
    for key, node in vars(config).items():
        for target in targets(node):
            if target not in _builtin_targets(key):
                raise InputError(_refusal(str(run), user, CONFIG, f"_target_: {target}"))


def check_code(named: str, run: Path, trust: Any) -> None:
    """Raise InputError if the run has a copy of custom modules and an untrusted user owns the run or the copy."""
    copy = find_code(run)
    if copy is None:
        return
    files = sorted(copy.rglob("*"))
    if user := untrusted_owner(run, trust, (OVERRIDES, RESULT, *map(str, (copy, *files)))):
        module = next((each.name for each in files if each.suffix == ".py"), "")
        raise InputError(_refusal(named, user, str(copy), module))


def untrusted_owner(run: Path, trust: Any, files: Sequence[str] = (OVERRIDES,)) -> str | None:
    """Return the other user who owns the directory, one of `files` or an archive of code; None if it is trusted."""
    if trust is True:
        return None
    archives = (*run.glob(ARCHIVE), *run.parent.glob(ARCHIVE))  # jobs of a sweep share its archive
    for path in (run, run / CONFIG, *(run / file for file in files), *archives):
        try:
            uid = os.stat(path).st_uid
        except OSError:
            continue
        if uid != os.geteuid():
            try:
                return f"{pwd.getpwuid(uid).pw_name} (uid {uid})"
            except KeyError:
                return f"uid {uid}"
    return None


def _refusal(named: str, user: str, file: str, code: str) -> str:
    return f"{named} belongs to {user}, and its {file} names code to run, {code}; {_FIX}"


def _is_harmless(text: str) -> bool:
    """Return True if the override only chooses built-in options, numbers, booleans, null, or strings for `_TEXTS`."""
    try:
        (override,) = OverridesParser.create().parse_overrides([text[:_MAX_LENGTH]])
        key = str(override.key_or_group)
        if len(text) > _MAX_LENGTH or override.package is not None or not _KEY.fullmatch(key):
            return False
        leaves = list(_leaves(key, override._value))
    except (HydraException, RecursionError):
        return False
    if key in _CHOSEN_BY_NAME:
        return all(name == key and (value is None or str(value) in _options(key)) for name, value in leaves)
    return key.partition(".")[0] in KEYS and all(_is_harmless_value(name, value) for name, value in leaves)


def _leaves(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the values of an override, which may be nested or swept, each with its dotted key."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _leaves(f"{key}.{name}", inner)
    elif isinstance(value, (list, ChoiceSweep)):
        for inner in value if isinstance(value, list) else value.list:
            yield from _leaves(key, inner)
    elif isinstance(value, (RangeSweep, IntervalSweep)):
        yield key, 0
    else:
        yield key, value.text if isinstance(value, QuotedString) else value


def _is_harmless_value(key: str, value: Any) -> bool:
    def is_one_of(patterns: Sequence[str]) -> bool:
        return any(fnmatch.fnmatchcase(key, pattern) for pattern in patterns)

    if not _KEY.fullmatch(key):  # such as _target_ and other keys of Hydra's instantiation
        return False
    if isinstance(value, str):
        return is_one_of(_TEXTS) and _TEXT.fullmatch(value) is not None
    if not (value is None or isinstance(value, (bool, int, float))):
        return False
    is_refused = any(f"{key}.".startswith(f"{name}.") for name in _REFUSED)
    return not is_refused or is_one_of(_NUMBERS)


@functools.cache
def _options(group: str) -> frozenset[str]:
    """Return the built-in options, except launcher=slurm, because a queued job reads its code from the directory."""
    options = {path.stem for path in (CONF / group).glob("*.yaml")}
    return frozenset(options - {"slurm"} if group == "launcher" else options)


@functools.cache
def _builtin_targets(group: str) -> frozenset[str]:
    return frozenset(target for file in (CONF / group).rglob("*.yaml") for target in _TARGET.findall(file.read_text()))
