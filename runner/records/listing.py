"""Lists of runs and sweeps: an entry for each, and the columns that commands show of it."""

import fnmatch
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from rich import filesize

from runner.errors import InputError, did_you_mean
from runner.records.attempts import error_line, read_attempts
from runner.records.compared_runs import UNREADABLE, current_run
from runner.records.finding import CELLS, check_is_record, find_records, newest_record
from runner.records.interruptions import describe_interruptions
from runner.records.labels import Labels, read_labels
from runner.records.ledger import is_sweep, read_ledger
from runner.records.run_directory import CHECKPOINTS
from runner.records.run_record import DONE, RunRecord, Standing
from runner.records.settings import OVERRIDES
from runner.records.start_time import started_at
from runner.records.tables import Cells, as_number, format_number, without_empty_columns

# The state of a sweep is the first of these states that one of its jobs has.
STATES = ("running", "queued", "lost", "failed", "refused", "preempted", "removed", "waiting", *DONE[::-1])
UNITS_S = {"d": 86400, "h": 3600, "min": 60, "s": 1}

Name = str | os.PathLike[str]  # of a run or sweep, or of a directory


@dataclass(frozen=True, eq=False)
class Entry:
    """A run, a job or a sweep in a list."""

    path: Path
    folder: Path  # the listed directory
    runs: list[RunRecord]  # the run, or those of the jobs of the sweep
    labels: Labels
    is_sweep: bool = False

    @property
    def name(self) -> str:
        """The path relative to the listed directory if it is below it."""
        return str(self.path).removeprefix(f"{self.folder}/")

    @property
    def state(self) -> str:
        return min((run.state for run in self.runs), key=_state_order, default="waiting")

    @property
    def done(self) -> str:
        """The number of finished, pruned or paused jobs, as 3/4; empty for a run."""
        return f"{sum(run.state in DONE for run in self.runs)}/{len(self.runs)}" if self.is_sweep else ""

    @cached_property
    def standing(self) -> Standing:
        """The monitor and its values; of a sweep, those of its best job."""
        standings = [run.standing for run in self.runs]
        monitor = next((each.monitor for each in standings if each.monitor), None)
        if monitor is None:
            return Standing()
        values = {index: each.best for index, each in enumerate(standings) if each.monitor == monitor}
        order = monitor.best(values) if self.is_sweep else [0]
        return standings[order[0]] if order else Standing(monitor)

    @cached_property
    def started(self) -> float:
        """The time of the first start, in seconds since 1970."""
        return started_at(self.path, "" if self.is_sweep else self.runs[0].started) or 0.0

    @property
    def age(self) -> str:
        return describe_age(time.time() - self.started)

    @cached_property
    def size(self) -> int:
        """The size on the disk in bytes. Links are not followed."""
        return _size(str(self.path))

    @property
    def rank(self) -> tuple[bool, str, float]:
        """A sort key by the best value, the best one first and entries without a value last."""
        monitor, best, _ = self.standing
        if monitor is None or not math.isfinite(best):
            return True, "", 0.0
        return False, monitor.name, -best if monitor.direction == "max" else best


@dataclass(frozen=True)
class Column:
    """A fact about a run or sweep, by the name under which commands show it. An empty text is not shown."""

    name: str
    in_list: Callable[[Entry], str] | None = None  # the text in the table of `runs list`
    in_show: Callable[[Entry], str] | None = None  # the text in the lines of `runs show`
    in_json: Callable[[Entry], Any] | None = None  # the value in the output with --json


def _recorded(name: str) -> Column:
    """Return the column of a field of the record, which `runs show` shows."""
    return Column(name, in_show=lambda entry: _text(entry, name))


# Each view shows the columns that it has, in this order.
COLUMNS = (
    Column("name", in_list=lambda entry: entry.name),
    Column("path", in_show=lambda entry: str(entry.path), in_json=lambda entry: str(entry.path.absolute())),
    Column("kind", in_json=lambda entry: "sweep" if entry.is_sweep else "run"),
    Column(
        "state",
        in_list=lambda entry: entry.state,
        in_show=lambda entry: f"{entry.state} {entry.done}".strip(),
        in_json=lambda entry: entry.state,
    ),
    Column("done", in_list=lambda entry: entry.done),
    Column("jobs", in_json=lambda entry: dict(Counter(run.state for run in entry.runs)) if entry.is_sweep else None),
    Column("error", in_show=lambda entry: error_line(_text(entry, "error")) or ""),
    *(_recorded(name) for name in ("command", "task", "model", "data", "parallel", "world_size", "hosts")),
    *(_recorded(name) for name in ("step", "epoch", "seconds")),
    Column(
        "monitor",
        in_list=lambda entry: entry.standing.monitor.name if entry.standing.monitor else "",
        in_json=lambda entry: asdict(entry.standing.monitor) if entry.standing.monitor else None,
    ),
    Column("best", in_list=lambda entry: _number(entry.standing.best), in_json=lambda entry: entry.standing.best),
    Column("last", in_list=lambda entry: _number(entry.standing.last), in_json=lambda entry: entry.standing.last),
    Column("started", in_json=lambda entry: datetime.fromtimestamp(entry.started, UTC).isoformat(timespec="seconds")),
    Column("age", in_list=lambda entry: entry.age, in_show=lambda entry: entry.age),
    Column(
        "size",
        in_list=lambda entry: filesize.decimal(entry.size),
        in_show=lambda entry: filesize.decimal(entry.size),
    ),
    Column("size_bytes", in_json=lambda entry: entry.size),
    Column("attempts", in_show=lambda entry: ", ".join(attempt.state for attempt in read_attempts(entry.path))),
    Column("interruptions", in_show=lambda entry: describe_interruptions(entry.path)),
    _recorded("goodput"),
    Column("checkpoints", in_show=lambda entry: ", ".join(_checkpoints(entry.path))),
    Column(
        "tags",
        in_list=lambda entry: " ".join([*entry.labels.tags, *["(archived)"] * entry.labels.archived]),
        in_show=lambda entry: " ".join(entry.labels.tags),
        in_json=lambda entry: entry.labels.tags,
    ),
    Column("archived", in_json=lambda entry: entry.labels.archived),
)

ORDERS: dict[str, Callable[[Entry], Any]] = {
    "started": lambda entry: -entry.started,  # the newest first
    "name": lambda entry: entry.name,
    "state": lambda entry: _state_order(entry.state),
    "best": lambda entry: entry.rank,
    "size": lambda entry: -entry.size,
}


def as_cells(entries: Sequence[Entry]) -> Cells:
    """Return the table of the entries that `runs list` prints."""
    shown = {column.name: column.in_list for column in COLUMNS if column.in_list}
    return without_empty_columns([[*shown], *([text(entry) for text in shown.values()] for entry in entries)])


def as_facts(entry: Entry) -> dict[str, str]:
    """Return the texts that `runs show` prints about an entry, by name."""
    facts = {column.name: column.in_show(entry) for column in COLUMNS if column.in_show}
    monitor, best, last = entry.standing
    if monitor is not None:
        facts[monitor.name] = f"best {format_number(best)}, last {format_number(last)}"
    metrics = {} if entry.is_sweep else entry.runs[0].metrics
    facts |= {name: format_number(value) for name, value in metrics.items() if name not in facts}
    return {name: text for name, text in facts.items() if text}


def as_json(entry: Entry) -> dict[str, Any]:
    """Return the values that --json prints about an entry, by name. Times are in UTC."""
    return {column.name: column.in_json(entry) for column in COLUMNS if column.in_json}


def list_entries(folder: Path, expands_jobs: bool = False, skipped: list[str] | None = None) -> list[Entry]:
    """Return an entry for each run and sweep below a directory.

    expands_jobs: return an entry for each job instead of its sweep. The runs that a task=compare starts have none. A
    message about each damaged run or sweep is added to `skipped`.
    """
    entries, sweeps, skipped = list[Entry](), set[Path](), [] if skipped is None else skipped
    expands_jobs = expands_jobs or is_sweep(folder)
    for path, has_jobs in find_records(folder, skipped):
        if path.parent in sweeps or (path.parent.name == CELLS and (path.parent.parent / OVERRIDES).is_file()):
            continue
        if has_jobs:
            sweeps.add(path)
        try:
            if not has_jobs:
                found = [_entry(current_run(path), folder)]
            elif expands_jobs:
                found = [_entry(current_run(job.directory, job), folder) for job in read_ledger(path)]
            else:
                found = [read_entry(path, folder)]
            _ = [(entry.standing, entry.started) for entry in found]  # reads the files
            entries += found
        except UNREADABLE as error:
            skipped.append(f"{path} is skipped: {str(error) if isinstance(error, InputError) else 'it is damaged'}")
    return entries


def read_entry(path: Path, folder: Path) -> Entry:
    """Return the entry of a run, a job or a sweep. Raises InputError if its files are damaged."""
    if is_sweep(path):
        runs = [current_run(job.directory, job) for job in read_ledger(path)]
        return Entry(path, folder, runs, read_labels(path), is_sweep=True)
    jobs = read_ledger(path.parent) if is_sweep(path.parent) else []
    return _entry(current_run(path, next((job for job in jobs if job.directory == path), None)), folder)


def _entry(run: RunRecord, folder: Path) -> Entry:
    return Entry(run.directory, folder, [run], read_labels(run.directory))


def find_record(run: Name, outputs: Name = "outputs", adds_jobs: bool = False) -> Path:
    """Return the path of the run or sweep that `run` names by a path, "last" (newest) or a unique prefix of a name.

    Parent directories may precede a name: run/2026, sweep-20261120-192348/3. Raises InputError unless one matches.

    adds_jobs: also find jobs of sweeps that have no directory, because they have not started.
    """
    text, folder = os.fspath(run), Path(outputs).absolute()
    if text == "last" and (newest := newest_record([folder, *(path for path in folder.glob("*") if path.is_dir())])):
        return newest
    path = Path(text).absolute()
    if path.is_dir():
        check_is_record(path, "RUN")
        return path
    parts, folder = text.strip("/").split("/"), path.parent if is_sweep(path.parent) else folder
    records = dict(find_records(folder) if folder.is_dir() else ())
    sweeps = [path for path, has_jobs in records.items() if has_jobs and adds_jobs]
    paths = dict.fromkeys([*records, *(job.directory for sweep in sweeps for job in read_ledger(sweep))])
    names = {path: path.parts[-len(parts) :] for path in paths}
    named = [found for found, (*parents, name) in names.items() if parents == parts[:-1] and name.startswith(parts[-1])]
    found = [each for each in named if each.name == parts[-1]] or named
    if len(found) == 1:
        return found[0].absolute()
    if found:
        listed = ", ".join(sorted(os.path.relpath(each, folder) for each in found)[:3])
        raise InputError(f"{text} is the beginning of {len(found)} names ({listed}, ...); type more of the name")
    raise InputError(f"{text} is no run or sweep in {folder}; `runs list {folder}` lists them")


def select(
    entries: Sequence[Entry],
    where: Sequence[str],
    tags: Iterable[str],
    states: Collection[str],
    name: str,
    skipped: list[str],
) -> list[Entry]:
    """Return the entries that match all conditions. Raises InputError for a key or a tag that no entry has.

    where: conditions key=value on the overrides and the configuration; a sweep matches if one of its jobs does. Runs
    whose configuration is damaged do not match, and a message about each of them is added to `skipped`.
    """
    chosen = [entry for entry in entries if fnmatch.fnmatchcase(entry.name, f"*{name}*")]
    for tag in tags:
        known = sorted({other for entry in entries for other in entry.labels.tags})
        if tag not in known:
            raise InputError(f"--tag {tag}: no run has this tag{did_you_mean(tag, known)}")
        chosen = [entry for entry in chosen if tag in entry.labels.tags]
    readable = {entry: [run for run in entry.runs if _is_readable(run, skipped)] for entry in entries if where}
    for condition in where:
        key, equals, value = condition.partition("=")
        if not equals:
            raise InputError(f"--where {condition}: must be KEY=VALUE, as in --where model=mlp")
        known_runs = [run for runs in readable.values() for run in runs]
        if not any(_has(run, key) for run in known_runs):
            keys = ((*run.overrides_by_key, *run.settings) for run in known_runs[:100])
            known = sorted({key for found in keys for key in found})
            raise InputError(f"--where {condition}: no run has recorded {key}{did_you_mean(key, known)}")
        chosen = [entry for entry in chosen if any(_equal(run.value(key), value) for run in readable[entry])]
    return [entry for entry in chosen if not states or entry.state in states]


def _text(entry: Entry, name: str) -> str:
    """Return a field of the record as text; empty for a sweep and for a run that has not recorded it."""
    if entry.is_sweep or not entry.runs[0].is_recorded:
        return ""
    value = getattr(entry.runs[0], name)
    if isinstance(value, list):
        return " ".join(map(str, value))
    return "" if value is None else str(value)


def _number(value: float) -> str:
    return format_number(value) if math.isfinite(value) else ""


def describe_age(seconds: float) -> str:
    unit = next((unit for unit, size in UNITS_S.items() if seconds >= size), "s")
    return f"{max(0, int(seconds / UNITS_S[unit]))} {unit}"


def _checkpoints(path: Path) -> list[str]:
    steps = [each.name.removeprefix("step_") for each in (path / CHECKPOINTS).glob("step_*")]
    # One that is being saved has another ending.
    return [f"step_{step}" for step in sorted(int(step) for step in steps if step.isdecimal())]


def _state_order(state: str) -> int:
    return STATES.index(state) if state in STATES else len(STATES)


def _is_readable(run: RunRecord, skipped: list[str]) -> bool:
    try:
        _ = run.overrides, run.settings  # reads the files
    except InputError as error:
        skipped.append(f"{run.directory} is skipped: {error}")
        return False
    return True


def _has(run: RunRecord, key: str) -> bool:
    return key == "world_size" or key in run.overrides_by_key or key in run.settings


def _equal(text: str, value: str) -> bool:
    number, other = as_number(text), as_number(value)
    return text == value or (number is not None and number == other)


def _size(path: str) -> int:
    total = 0
    try:
        with os.scandir(path) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    total += _size(entry.path)
                else:
                    total += entry.stat(follow_symlinks=False).st_blocks * 512
    except OSError:  # the file was removed meanwhile, or is not readable
        pass
    return total
