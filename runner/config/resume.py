"""`resume=`, `fork=` and `run=`: the overrides of an earlier run or sweep, merged with those of the command line."""

import re
import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from runner.checkpoints.layout import LAST, lacks_base
from runner.config.custom_dirs import absolute_dirs
from runner.config.diagnostics.keys import key_of
from runner.config.pointers import (
    ANY_NAME,
    check_location,
    find_directory,
    pin_checkpoint,
    pointer_to,
    quote,
    remote_overrides,
)
from runner.config.recorded_code import CURRENT, RECORDED
from runner.config.texts import keep_text
from runner.config.trust import check_trusted
from runner.errors import InputError
from runner.records.custom_code import find_code
from runner.records.finding import check_is_record
from runner.records.ledger import LEDGER, is_sweep, read_ledger, read_sweep
from runner.records.logged_numbers import check_comparable
from runner.records.run_directory import CHECKPOINTS
from runner.records.run_files import read_string_list
from runner.records.run_record import find_run
from runner.records.settings import CONFIG_DIR, OVERRIDES, split_words
from runner.remote.address import is_remote

ALIASES = {"checkpoint": "checkpoint.load", "init_from": "init_from.path", "diff.with": "diff.other"}
# These tasks read directories as data: no recorded override is composed. Each maps to the kind of its directories.
READS_RECORDS = {"report": "sweep or run", "diff": "run"}
OF_START = ("fork", "checkpoint.load")  # the checkpoint from which a run started; other runs do not inherit it
OF_TRAINING = (*OF_START, "profile", "debug")  # not inherited by tasks that do not train, which reject them
NOT_RECORDED = ("resume_force", "trust", "code")
POINTERS = ("run", "resume", "fork")  # keys that name a run whose overrides are composed
LOCATIONS = (*POINTERS, "outputs", "name")
# Recorded values do not apply to a new run: its command chooses where results are written.
OF_RESULTS = ("outputs", "name", "run_id", "export.output", "predict.output", "report.output")
OVER = "report.over"  # also a key of a sweep, for the table at its end
STOP_ON_FAILURE = "sweep.stop_on_failure"


@dataclass(frozen=True)
class Arguments:
    """The arguments to compose, and those that a new run records. `Request` describes the other fields."""

    overrides: list[str]  # to compose
    recorded: list[str]
    config_dirs: list[str]  # absolute paths in the order of the command line
    directory: str | None = None  # the run or sweep directory to resume; None for a new one
    launch_overrides: list[str] = field(default_factory=list)  # `Request.queued_overrides`
    code_of: str | None = None
    resume_force: bool = False  # resume a sweep even if its code has changed


@dataclass(frozen=True)
class _Command:
    """The overrides of a command, as parsed, and its custom directories."""

    given: list[Override]
    config_dirs: list[str]

    @cached_property
    def overrides(self) -> list[str]:
        return [str(override.input_line) for override in self.given]

    @cached_property
    def values(self) -> dict[str, Any]:
        return {override.key_or_group: override.value() for override in self.given}

    @property
    def task(self) -> str:
        return str(self.values.get("task", "train"))

    @cached_property
    def pointer(self) -> Override | None:
        """The override that names an earlier run, if there is one. Raises InputError if there are several."""
        found = [each for each in self.given if each.key_or_group in POINTERS and each.value() is not None]
        if len({each.key_or_group for each in found}) > 1:
            raise InputError(f"{' and '.join(str(each.input_line) for each in found)} exclude each other; drop one")
        return found[0] if found else None

    @property
    def others(self) -> list[Override]:
        return [override for override in self.given if override is not self.pointer]

    def unchanged(self) -> Arguments:
        lasting = _recordable(self.overrides)
        launched = self.overrides if lasting != self.overrides else []
        return Arguments(self.overrides, lasting, self.config_dirs, launch_overrides=launched)


def add_recorded(overrides: list[str], config_dirs: Sequence[str], multirun: bool) -> Arguments:
    """Merge the arguments of a command with those that the run of `resume=`, `fork=` or `run=` recorded."""
    overrides = [_with_full_key(override) for override in overrides]
    try:
        given = _parse(overrides, multirun)
    except HydraException:
        return Arguments(overrides, overrides, list(config_dirs))  # composing reports the syntax error
    command = _with_known_name(_Command(given, list(config_dirs)), multirun)
    key = command.pointer.key_or_group if command.pointer else None
    if multirun and key == "resume":
        return _resume_sweep(command)
    if command.task in READS_RECORDS:
        return command.unchanged() if multirun else _read_records(command, READS_RECORDS[command.task])
    if key is None:
        return _named_sweep(command) if multirun and "run_id" in command.values else command.unchanged()
    if multirun:
        return _sweep_from_runs(command)
    if key == "resume":
        return _resume(command)
    if key == "fork":
        return _fork(command)
    return _repeat(command) if command.task in ("rerun", "trace") else _read_run(command)


def _parse(overrides: list[str], multirun: bool) -> list[Override]:
    """Return the parsed overrides, with environment variables in keys that name a run, and with text as typed."""
    parser = OverridesParser.create()
    given = parser.parse_overrides(overrides)
    for override in given:
        if not multirun and override.key_or_group in LOCATIONS and override.is_sweep_override():
            key, _, value = str(override.input_line).partition("=")
            quoted = shlex.quote(f"{key}={quote(value)}")
            raise InputError(f"{override.input_line}: a path with a comma must be quoted; type {quoted}")
        if override.key_or_group == "run_id" and override.is_sweep_override():
            raise InputError(f"{override.input_line}: a run or a sweep has one run_id; type a single name")
    return parser.parse_overrides([keep_text(_with_environment(override)) for override in given])


def _with_known_name(command: _Command, multirun: bool) -> _Command:
    """Return the command; with name=*, `last` is replaced by the newest directory of all names."""
    if command.pointer is None or command.pointer.value() != LAST or command.values.get("name") != ANY_NAME:
        return command
    key = command.pointer.key_or_group
    kind = READS_RECORDS.get(command.task, "sweep" if multirun and key == "resume" else "run")
    path = find_directory(key, command.values, kind)
    kept = [override for override in command.overrides if key_of(override) not in ("name", key)]
    return _Command(OverridesParser.create().parse_overrides([*kept, pointer_to(path, key)]), command.config_dirs)


def _resume(command: _Command) -> Arguments:
    path = _find_run(command, "resume")
    check_location(path, command.values)
    recorded, directories = _recorded(command, path, "resume")
    merged = _merge(recorded, _at_address(command.others, path, command.values))
    return Arguments([*merged, pointer_to(path, "resume")], _recordable(merged), directories, str(path))


def _at_address(others: list[Override], path: Path, values: Mapping[str, Any]) -> list[Override]:
    """Return the overrides with those by which a resumed run or sweep is mirrored to the address of its copy."""
    added = OverridesParser.create().parse_overrides(remote_overrides(path, values))
    keys = [each.key_or_group for each in added]
    return [*(each for each in others if each.key_or_group not in keys), *added]


def _fork(command: _Command) -> Arguments:
    path = _find_run(command, "fork")
    recorded, directories = _recorded(command, path, "fork", (*OF_RESULTS, *OF_START))
    checkpoint = str(command.values.get("checkpoint.load", LAST))
    merged = pin_checkpoint(_merge(recorded, command.others), path, checkpoint)
    return _of_new_run(merged, pointer_to(path, "fork"), directories)


def _read_run(command: _Command) -> Arguments:
    """Return the arguments of a task that reads the run of `run=`, such as evaluate."""
    path = _find_run(command, "run")
    recorded, directories = _recorded(command, path, "run", (*OF_RESULTS, *OF_TRAINING))
    merged = _merge(recorded, command.others)
    return _of_new_run(merged, pointer_to(path, "run"), directories, _code_of(path, command.values))


def _repeat(command: _Command) -> Arguments:
    """Return the arguments of task=rerun or trace; the new run records those of a training run, as the old one did."""
    path = find_directory("run", command.values)
    recorded, directories = _recorded(command, path, "run", OF_RESULTS)
    merged = _merge(recorded, command.others)
    training = [override for override in merged if override.partition("=")[0] != "task"]
    threads = find_run(path).machine.get("threads")
    if type(threads) is int and not any(override.startswith("threads=") for override in merged):
        training.append(f"threads={threads}")  # the environment may imply another number now
    overrides = [*training, f"task={command.task}", pointer_to(path, "run")]
    code_of = _code_of(path, command.values)
    return Arguments(overrides, _recordable(training), directories, None, overrides, code_of)


def _find_run(command: _Command, key: str) -> Path:
    """Return the directory of the run that the key names. Raise InputError if `init_from` is set, too.

    `init_from.path` may name a copy of the file of frozen weights that the run's checkpoints leave out.
    """
    path = find_directory(key, command.values)
    for override in command.given:
        if override.key_or_group == "init_from.path" and lacks_base(path / CHECKPOINTS):
            if not Path(str(override.value())).exists():
                raise InputError(f"{override.input_line}: no such file or directory")
        elif override.key_or_group.partition(".")[0] == "init_from":
            named = f"{key}={command.values[key]}"
            raise InputError(
                f"{override.input_line} has no effect on {named}, which restores the weights of that run; leave it out"
            )
    return path


def _recorded(command: _Command, path: Path, key: str, dropped: Collection[str] = ()) -> tuple[list[str], list[str]]:
    """Return a run's overrides, without the keys `dropped`, and its custom directories with those of the command."""
    named = f"{key}={command.values[key]}"
    recorded, directories = read_arguments(path, named, command.values.get("trust"))
    kept = [override for override in recorded if key_of(override) not in dropped]
    return kept, _merge_dirs(named, directories, command.config_dirs)


def _of_new_run(merged: list[str], pointing: str, config_dirs: list[str], code_of: str | None = None) -> Arguments:
    """Return the arguments of a new run that reads an earlier one."""
    lasting = _recordable(merged)
    launched = [*merged, pointing] if lasting != merged else []
    return Arguments([*merged, pointing], [*lasting, pointing], config_dirs, None, launched, code_of)


def read_arguments(run: Path, named: str, trust: Any = None) -> tuple[list[str], list[str]]:
    """Return the overrides and the custom directories that a run recorded. Raise InputError as `check_trusted` does."""
    recorded = read_string_list(run / OVERRIDES)
    check_trusted(named, run, recorded, trust)
    return split_words(recorded)


def _merge(recorded: list[str], given: list[Override]) -> list[str]:
    """Return the recorded overrides that the given ones do not replace, by key or by group, and then the given ones."""

    def dotted_key(override: Override) -> str:
        return f"{override.key_or_group}.".replace("/", ".")

    replaced = ("run.", "resume.", *map(dotted_key, given))
    parsed = OverridesParser.create().parse_overrides(recorded)
    kept = [override for override in parsed if not dotted_key(override).startswith(replaced)]
    return [str(override.input_line) for override in (*kept, *given)]


def _recordable(overrides: list[str]) -> list[str]:
    """Return the overrides without those that apply to one command only."""
    return [override for override in overrides if key_of(override) not in NOT_RECORDED]


def _resume_sweep(command: _Command) -> Arguments:
    resume, values = command.pointer, command.values
    assert resume is not None
    named = str(resume.input_line)
    if resume.is_sweep_override():
        raise InputError(f"{named}: one sweep at a time; type one directory, or resume=last")
    path = find_directory("resume", values, "sweep")
    check_location(path, values)
    try:
        recorded, jobs = read_sweep(path), read_ledger(path)
    except OSError as error:
        raise InputError(f"{named}: its {LEDGER} cannot be read ({error}); start a new sweep") from None
    words = [*(f"{CONFIG_DIR}{directory}" for directory in recorded.config_dirs), *recorded.typed]
    check_trusted(named, path, [*words, *(word for job in jobs for word in job.overrides)], values.get("trust"))
    others = [each for each in command.given if each.key_or_group not in ("resume", "resume_force", "trust")]
    # Values that add jobs apply once and are not recorded; Hydra's options, such as its launcher, are recorded.
    lasting = _merge(recorded.typed, [override for override in others if override.is_hydra_override()])
    directories = _merge_dirs(named, recorded.config_dirs, command.config_dirs)
    force = values.get("resume_force") is True
    reads = [each for each in OverridesParser.create().parse_overrides(recorded.typed) if each.key_or_group == "run"]
    read_values = dict(override.partition("=")[::2] for override in recorded.typed) | dict(values)
    code_of = _shared_code(reads[0], read_values, directories)[1] if reads else None
    merged = _merge(recorded.typed, _at_address(others, path, values))
    return Arguments(merged, lasting, directories, str(path), code_of=code_of, resume_force=force)


def _named_sweep(command: _Command) -> Arguments:
    """Return the arguments of a sweep that its `run_id` names; `resume_force` applies to the sweep, not to its jobs."""
    kept = [str(each.input_line) for each in command.given if each.key_or_group != "resume_force"]
    return Arguments(kept, kept, command.config_dirs, resume_force=command.values.get("resume_force") is True)


def _code_of(path: Path, values: Mapping[str, Any]) -> str | None:
    """Return the value of `Request.code_of`. Raise InputError if its copy of custom modules is missing."""
    default = CURRENT if values.get("task") == "rerun" else RECORDED
    if (values.get("code") or default) != RECORDED:
        return None
    find_code(path)
    return str(path)


def _sweep_from_runs(command: _Command) -> Arguments:
    """Return the arguments of a new sweep, each of whose jobs reads or forks a run."""
    assert command.pointer is not None
    directories, code_of = _shared_code(command.pointer, command.values, command.config_dirs)
    return Arguments(command.overrides, command.overrides, directories, code_of=code_of)


def _shared_code(run: Override, values: Mapping[str, Any], config_dirs: list[str]) -> tuple[list[str], str | None]:
    """Return the custom directories of the runs that a sweep reads, and the run whose copy of the code is imported.

    Raise InputError if the runs differ in them, because the jobs of a sweep share their imports.
    """
    key = run.key_or_group
    runs = list(run.sweep_string_iterator()) if run.is_discrete_sweep() else [str(run.value())]
    found, code_of = [], None
    for value in (run.strip("'\"") for run in runs):
        if is_remote(value):
            raise InputError(f"{key}={value}: the jobs of a sweep read local directories; type runs pull {value} first")
        named, path = f"{key}={value}", find_directory(key, {**values, key: value})
        recorded = read_arguments(path, named, values.get("trust"))[1]
        code_of = _code_of(path, values) if key == "run" else None
        copy = find_code(path) if code_of else None
        found.append((_merge_dirs(named, recorded, config_dirs), copy and copy.name))
    if any(each != found[0] for each in found):
        what = "custom directories" if any(each[0] != found[0][0] for each in found) else "custom code"
        raise InputError(f"{run.input_line}: the runs have different {what}; run a command for each")
    return found[0][0] if found else config_dirs, code_of


def _merge_dirs(named: str, recorded: Sequence[str], config_dirs: Sequence[str]) -> list[str]:
    """Return the recorded directories and then those of the command, which may replace missing ones."""
    missing = [directory for directory in recorded if not Path(directory).is_dir()]
    if missing and not config_dirs:
        raise InputError(f"{named}: its {CONFIG_DIR}{missing[0]} no longer exists; add --config-dir=NEW_LOCATION")
    existing = [directory for directory in recorded if directory not in missing]
    return absolute_dirs([*existing, *config_dirs])


def _read_records(command: _Command, kind: str) -> Arguments:
    """Check the directories that task=report or task=diff reads, before torch is imported, and replace `last`."""
    values = command.values
    others = values.get("report.runs")
    for path in others if isinstance(others, list) else []:
        if is_remote(path):
            raise InputError(f"report.runs={path}: a list must name local directories; type runs pull {path} first")
        check_is_record(Path(str(path)).absolute(), "report.runs")
    if values.get("run") is None:
        return command.unchanged()
    paths = {"run": find_directory("run", values, kind)}
    if kind == "run":
        if values.get("diff.other") is None:
            raise InputError("task=diff needs the run to compare with run=; add diff.with=RUN_DIR")
        paths["diff.other"] = find_directory("diff.with", {**values, "diff.with": values["diff.other"]})
        if paths["run"].resolve() == paths["diff.other"].resolve():
            raise InputError(
                f"diff.with={values['diff.other']} is the same run as run={values['run']}; name two different runs"
            )
        check_comparable((paths["run"], paths["diff.other"]))
    kept = [override for override in command.given if override.key_or_group not in paths]
    if kind != "run" and OVER not in values and is_sweep(paths["run"]):
        kept += _averaged_over(paths["run"])
    overrides = [*_merge([], kept), *(pointer_to(path, key) for key, path in paths.items())]
    return Arguments(overrides, overrides, command.config_dirs)


def _averaged_over(sweep: Path) -> list[Override]:
    """Return the override of OVER that the sweep recorded, if it is a list of keys, with nothing to interpolate."""
    try:
        typed = read_sweep(sweep).typed
    except InputError:  # a ledger without a line for the sweep still has jobs
        return []
    recorded = [text for text in typed if re.fullmatch(rf"{re.escape(OVER)}=\[[\w.,]*\]", text)]
    return OverridesParser.create().parse_overrides(recorded)


def _with_environment(override: Override) -> str:
    """Return the override; if its key names a run, with the values of the environment variables in it.

    The run must be known before the configuration is composed. `${oc.env:RUN,null}` may become null.
    """
    line, value = str(override.input_line), override.value()
    if override.key_or_group not in LOCATIONS or not isinstance(value, str) or "${" not in value:
        return line
    try:
        found = OmegaConf.create({"it": value}).it
    except OmegaConfBaseException:  # another reference, or a missing variable, which composing reports
        return line
    found = "null" if found is None else quote(str(found))
    return line if "${" in found else f"{line.partition('=')[0]}={found}"


def _with_full_key(override: str) -> str:
    """Return the override with its full key: `checkpoint=best` becomes `checkpoint.load=best`."""
    key, assigned, value = override.partition("=")
    if assigned and not value.lstrip().startswith("{"):
        key = ALIASES.get(key, key)
    return f"{key}{assigned}{value}"
