"""`resume=` and `run=`: the overrides that an earlier run or sweep recorded, merged with those of the command line."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from runner.config.custom_dirs import absolute_dirs
from runner.config.trust import check_overrides
from runner.errors import InputError
from runner.records.ledger import LEDGER, is_sweep, read_ledger, read_sweep
from runner.records.record_files import read_string_list
from runner.records.records import check_is_record, newest_record, newest_training_run
from runner.records.result import read_result
from runner.records.run_directory import OVERRIDES

ALIASES = {"checkpoint": "checkpoint.load", "init_from": "init_from.path"}
READS_RECORDS = "report"  # this task reads directories as data: no recorded override is composed
OF_TRAINING = ("profile", "debug")  # not inherited by tasks that do not train, which reject them
NOT_RECORDED = ("resume_force", "trust")  # valid for one command
_FLAG = "--config-dir="


@dataclass(frozen=True)
class Arguments:
    """The arguments to compose, and those that a new run records.

    Attributes:
        overrides: the overrides to compose.
        recorded: the overrides that the run records.
        config_dirs: absolute paths in the order of the command line.
        directory: the run or sweep directory to resume; None for a new one.
        launch_overrides: as `Request.launch_overrides`.
    """

    overrides: list[str]
    recorded: list[str]
    config_dirs: list[str]
    directory: str | None = None
    launch_overrides: list[str] = field(default_factory=list)


def add_recorded(overrides: list[str], config_dirs: Sequence[str], multirun: bool) -> Arguments:
    """Return the arguments of a command, after those that the run of `resume=` or `run=` recorded.

    Raise InputError if there is no such run, or if it belongs to another user who is not trusted.
    """
    overrides, config_dirs = [_with_full_key(override) for override in overrides], list(config_dirs)
    unchanged = Arguments(overrides, overrides, config_dirs)
    try:
        given = OverridesParser.create().parse_overrides(overrides)
    except HydraException:
        return unchanged  # composing reports the syntax error
    values = {override.key_or_group: override.value() for override in given}
    task = str(values.get("task", "train"))
    key = next((key for key in values if key in ("run", "resume") and values[key] is not None), None)
    if task == READS_RECORDS and not multirun:
        return _resolve_records(unchanged, given, values)
    if key is None:
        return unchanged
    pointer = next(override for override in given if override.key_or_group == key)
    if multirun and key == "resume":
        return _resume_sweep(pointer, given, values, config_dirs)
    if multirun:
        if task != READS_RECORDS:
            unchanged.config_dirs[:] = _shared_dirs(pointer, values, config_dirs)
        return unchanged

    named, is_rerun = f"{key}={values[key]}", key == "run" and task == "rerun"
    path = _find(key, values)
    weights = [override for override in given if override.key_or_group.partition(".")[0] == "init_from"]
    if weights and not is_rerun:
        raise InputError(
            f"{weights[0].input_line} has no effect on {named}, which restores the weights of that run; leave it out"
        )
    if key == "resume":
        _check_location(path, values)
    recorded, directories = read_overrides(path, named, values.get("trust"))
    directories = _merge_dirs(named, directories, config_dirs)
    others = [override for override in given if override is not pointer]
    kept = _not_replaced(OverridesParser.create().parse_overrides(recorded), others)
    if key == "run" and not is_rerun:
        kept = [override for override in kept if override.key_or_group not in OF_TRAINING]
    merged = _lines([*kept, *others])
    if is_rerun:
        return _rerun(merged, path, directories)
    pointing = f"{key}='{path}'"
    lasting = _recordable(merged)
    if key == "resume":
        return Arguments([*merged, pointing], lasting, directories, str(path))
    launched = [*merged, pointing] if lasting != merged else []
    return Arguments([*merged, pointing], [*lasting, pointing], directories, launch_overrides=launched)


def read_overrides(run: Path, named: str, trust: Any = None) -> tuple[list[str], list[str]]:
    """Return the overrides and the custom directories that a run recorded.

    Raise InputError if the file is damaged, or if another user's directory names code and is not trusted. `named` is
    how the command names the run, as run=DIR.
    """
    recorded = read_string_list(run / OVERRIDES)
    directories = [word.removeprefix(_FLAG) for word in recorded if word.startswith(_FLAG)]
    overrides = [word for word in recorded if not word.startswith("--")]
    check_overrides(named, run, overrides, directories, trust)
    return overrides, directories


def merge_overrides(recorded: list[str], given: list[str]) -> list[str]:
    """Return the recorded overrides that the given ones do not replace, and then the given ones."""
    parser = OverridesParser.create()
    kept = _not_replaced(parser.parse_overrides(recorded), parser.parse_overrides(given))
    return [*_lines(kept), *given]


def _not_replaced(recorded: list[Override], given: list[Override]) -> list[Override]:
    """Return the recorded overrides without replaced ones; another option of a group drops the keys of the group."""

    def key_of(override: Override) -> str:
        return f"{override.key_or_group}.".replace("/", ".")

    replaced = ("run.", "resume.", *map(key_of, given))
    return [override for override in recorded if not key_of(override).startswith(replaced)]


def _lines(overrides: Sequence[Override]) -> list[str]:
    return [str(override.input_line) for override in overrides]


def _recordable(overrides: list[str]) -> list[str]:
    return [override for override in overrides if override.partition("=")[0] not in NOT_RECORDED]


def _rerun(merged: list[str], path: Path, config_dirs: list[str]) -> Arguments:
    """Return the arguments of task=rerun; the new run records those of a training run, as the old one did."""
    training = [override for override in merged if override.partition("=")[0] != "task"]
    threads = (read_result(path) or {}).get("machine", {}).get("threads")
    if threads and not any(override.startswith("threads=") for override in merged):
        training.append(f"threads={threads}")  # the environment may imply another number now
    overrides = [*training, "task=rerun", f"run='{path}'"]
    return Arguments(overrides, _recordable(training), config_dirs, launch_overrides=overrides)


def _resume_sweep(
    resume: Override, given: list[Override], values: Mapping[str, Any], config_dirs: list[str]
) -> Arguments:
    if resume.is_sweep_override():
        raise InputError(f"{resume.input_line}: one sweep at a time; type one directory, or resume=last")
    path = _find("resume", values, is_for_sweep=True)
    _check_location(path, values)
    try:
        recorded, jobs = read_sweep(path), read_ledger(path)
    except OSError as error:
        raise InputError(f"{resume.input_line}: its {LEDGER} cannot be read ({error}); start a new sweep") from None
    words = [*recorded.typed, *(word for job in jobs for word in job.overrides)]
    check_overrides(f"resume={values['resume']}", path, words, recorded.config_dirs, values.get("trust"), (LEDGER,))
    others = [override for override in given if override is not resume]
    merged = merge_overrides(recorded.typed, _lines(others))
    # New jobs are added once; how jobs are run and chosen is recorded.
    lasting = _lines([override for override in others if override.is_hydra_override()])
    directories = _merge_dirs(resume.input_line or "", recorded.config_dirs, config_dirs)
    return Arguments(merged, merge_overrides(recorded.typed, lasting), directories, str(path))


def _shared_dirs(run: Override, values: Mapping[str, Any], config_dirs: list[str]) -> list[str]:
    """Return the custom directories of the runs that a sweep reads; they must be equal, as jobs share a search path."""
    runs = list(run.sweep_string_iterator()) if run.is_discrete_sweep() else [str(run.value())]
    found: dict[str, list[str]] = {}
    for value in (run.strip("'\"") for run in runs):
        recorded = read_overrides(_find("run", {**values, "run": value}), f"run={value}", values.get("trust"))[1]
        found[value] = _merge_dirs(f"run={value}", recorded, config_dirs)
        one, expected = next(iter(found.items()))
        if found[value] != expected:
            raise InputError(
                f"run={one} was created with {_FLAG}{expected} and run={value} with {_FLAG}{found[value]}, but the "
                "jobs of a sweep share one search path; run a command for each"
            )
    return expected


def _merge_dirs(named: str, recorded: Sequence[str], config_dirs: Sequence[str]) -> list[str]:
    """Return the recorded directories and then those of the command, which may replace missing ones."""
    existing = [directory for directory in recorded if Path(directory).is_dir()]
    if len(existing) < len(recorded) and not config_dirs:
        missing = next(directory for directory in recorded if directory not in existing)
        raise InputError(f"{named}: its {_FLAG}{missing} no longer exists; add --config-dir=DIR with its new place")
    return absolute_dirs([*existing, *config_dirs])


def _check_location(path: Path, values: Mapping[str, Any]) -> None:
    """Raise InputError for a name= or outputs= that is not the location of the resumed directory."""
    parent = path.parent.parent if is_sweep(path.parent) else path.parent
    rule = f"has no effect on resume={values['resume']}, which stays in its directory; leave it out"
    if str(values.get("name", parent.name)) != parent.name:
        raise InputError(f"name={values['name']} {rule}")
    if Path(str(values.get("outputs", parent.parent))).resolve() != parent.parent.resolve():
        raise InputError(f"outputs={values['outputs']} {rule}")


def _resolve_records(unchanged: Arguments, given: list[Override], values: Mapping[str, Any]) -> Arguments:
    """Check the directories that task=report reads, before torch is imported, and replace run=last."""
    others = values.get("report.runs")
    for path in others if isinstance(others, list) else []:
        check_is_record(Path(str(path)).absolute(), "report.runs")
    if values.get("run") is None:
        return unchanged
    if values["run"] != "last":
        check_is_record(Path(str(values["run"])).absolute(), "run")
        return unchanged
    overrides = _lines([override for override in given if override.key_or_group != "run"])
    overrides.append(f"run='{_find_last('run', values, 'sweep or run', newest_record)}'")
    return Arguments(overrides, overrides, unchanged.config_dirs)


def _find(key: str, values: Mapping[str, Any], is_for_sweep: bool = False) -> Path:
    """Return the directory of the run, or of the sweep to resume, that the key names."""
    value, file = str(values[key]), LEDGER if is_for_sweep else OVERRIDES
    kind = "sweep" if is_for_sweep else "run"
    if value == "last":
        return _find_last(key, values, kind, _newest_sweep if is_for_sweep else newest_training_run)
    path = Path(value).absolute()
    if is_sweep(path) and not is_for_sweep:
        raise InputError(f"{key}={value} is a sweep; {'add -m' if key == 'resume' else 'name a job'}")
    if not (path / file).is_file():
        what = f"no {kind} directory (it has no {file})" if path.is_dir() else "no directory"
        raise InputError(f"{key}={value} is {what}; name one under outputs/, or {key}=last")
    return path


def _find_last(key: str, values: Mapping[str, Any], kind: str, newest: Callable[[Path], Path | None]) -> Path:
    parent = _parent_directory(values)
    if (path := newest(parent)) is None:
        raise InputError(f"{key}=last: there is no {kind} under {parent}; set name= or outputs=, or name the directory")
    return path


def _newest_sweep(parent: Path) -> Path | None:
    return max((path.parent for path in parent.glob(f"sweep-*/{LEDGER}")), default=None)  # the names contain the time


def _parent_directory(values: Mapping[str, Any]) -> Path:
    """Return the directory in which runs of the command's name are created."""
    return Path(str(values.get("outputs", "outputs"))).absolute() / str(values.get("name", "run"))


def _with_full_key(override: str) -> str:
    """Return the override with its full key: `checkpoint=best` becomes `checkpoint.load=best`."""
    key, assigned, value = override.partition("=")
    if assigned and not value.lstrip().startswith("{"):
        key = ALIASES.get(key, key)
    return f"{key}{assigned}{value}"
