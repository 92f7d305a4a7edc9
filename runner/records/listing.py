"""Lists of runs and sweeps: a row for each, with its state, the values of its monitor, its age and its size."""

import fnmatch
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from rich import filesize

from runner.errors import InputError, did_you_mean
from runner.records.labels import Labels, read_labels
from runner.records.ledger import DONE, is_sweep, read_ledger
from runner.records.monitor import Monitor, recorded_monitor
from runner.records.records import CELLS, RunRecord, check_is_record, find_records, newest_record, read_run, single_run
from runner.records.result import read_result
from runner.records.run_directory import OVERRIDES
from runner.records.start_time import started_at
from runner.records.tables import Cells, as_number, format_number, without_empty_columns

# The state of a sweep is the first of these states that one of its jobs has.
STATES = ("running", "queued", "lost", "failed", "refused", "preempted", "removed", "waiting", "pruned", "finished")
UNITS_S = {"d": 86400, "h": 3600, "min": 60, "s": 1}

Name = str | os.PathLike[str]  # of a run or sweep, or of a directory


@dataclass(frozen=True, eq=False)
class Row:
    """The row of a run, a job or a sweep. `best` and `last` are values of the monitor, or NaN if there are none."""

    path: Path
    name: str  # relative to the listed directory if the path is below it
    state: str
    records: list[RunRecord]  # of the run, or of the jobs of the sweep
    started: float  # seconds since 1970
    monitor: Monitor | None = None
    best: float = math.nan
    last: float = math.nan
    labels: Labels = field(default_factory=Labels)
    is_sweep: bool = False

    @cached_property
    def size(self) -> int:
        """The size on the disk in bytes. Links are not followed."""
        return _size(str(self.path))

    @property
    def done(self) -> str:
        """The number of finished or pruned jobs, as 3/4; empty for a run."""
        return f"{sum(job.state in DONE for job in self.records)}/{len(self.records)}" if self.is_sweep else ""

    @property
    def rank(self) -> tuple[bool, str, float]:
        """A sort key by the best value, the best one first and rows without a value last."""
        if self.monitor is None or not math.isfinite(self.best):
            return True, "", 0.0
        return False, self.monitor.name, -self.best if self.monitor.direction == "max" else self.best

    def as_dict(self) -> dict[str, Any]:
        """Return the row as a dict for JSON, with the time in UTC."""
        return {
            "path": str(self.path.absolute()),
            "kind": "sweep" if self.is_sweep else "run",
            "state": self.state,
            "jobs": dict(Counter(job.state for job in self.records)) if self.is_sweep else None,
            "monitor": asdict(self.monitor) if self.monitor else None,
            "best": self.best,
            "last": self.last,
            "started": datetime.fromtimestamp(self.started, UTC).isoformat(timespec="seconds"),
            "size_bytes": self.size,
            **asdict(self.labels),
        }


ORDERS: dict[str, Callable[[Row], Any]] = {
    "started": lambda row: -row.started,  # the newest first
    "name": lambda row: row.name,
    "state": lambda row: _state_order(row.state),
    "best": lambda row: row.rank,
    "size": lambda row: -row.size,
}


def list_rows(folder: Path, expands_jobs: bool = False, skipped: list[str] | None = None) -> list[Row]:
    """Return a row for each run and sweep below a directory.

    expands_jobs: return a row for each job instead of its sweep. The runs that a task=compare starts have no rows. A
    message about each damaged run or sweep is added to `skipped`.
    """
    rows, sweeps, skipped = list[Row](), set[Path](), [] if skipped is None else skipped
    expands_jobs = expands_jobs or is_sweep(folder)
    for path, has_jobs in find_records(folder, skipped):
        if path.parent in sweeps or (path.parent.name == CELLS and (path.parent.parent / OVERRIDES).is_file()):
            continue
        if has_jobs:
            sweeps.add(path)
        try:
            if has_jobs and not expands_jobs:
                rows.append(read_row(path, folder))
            else:
                jobs = read_ledger(path) if has_jobs else [single_run(path)]
                rows += [_row_of_run(read_run(job), folder) for job in jobs]
        except (AttributeError, KeyError, OSError, OverflowError, RecursionError, TypeError, ValueError) as error:
            skipped.append(f"{path} is skipped: {str(error) if isinstance(error, InputError) else 'it is damaged'}")
    return rows


def read_row(path: Path, folder: Path) -> Row:
    """Return the row of a run, a job or a sweep. Raises InputError if its files are damaged."""
    if not is_sweep(path):
        jobs = read_ledger(path.parent) if is_sweep(path.parent) else []
        record = read_run(next((job for job in jobs if job.directory == path), single_run(path)))
        return _row_of_run(record, folder)
    records = [read_run(job) for job in read_ledger(path)]
    rows = {index: _row_of_run(record, folder) for index, record in enumerate(records)}
    monitor = next((row.monitor for row in rows.values() if row.monitor), None)
    order = monitor.best({i: row.best for i, row in rows.items() if row.monitor == monitor}) if monitor else []
    state = min((record.state for record in records), key=_state_order, default="waiting")
    values = (rows[order[0]].best, rows[order[0]].last) if order else (math.nan, math.nan)
    name, started = str(path).removeprefix(f"{folder}/"), started_at(path) or 0.0
    return Row(path, name, state, records, started, monitor, *values, read_labels(path), is_sweep=True)


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
    rows: Sequence[Row],
    where: Sequence[str],
    tags: Iterable[str],
    states: Collection[str],
    name: str,
    skipped: list[str],
) -> list[Row]:
    """Return the rows that match all conditions. Raises InputError for a key or a tag that no row has.

    where: conditions key=value on the overrides and the configuration; a sweep matches if one of its jobs does. Runs
    whose configuration is damaged do not match, and a message about each of them is added to `skipped`.
    """
    chosen = [row for row in rows if fnmatch.fnmatchcase(row.name, f"*{name}*")]
    for tag in tags:
        known = sorted({other for row in rows for other in row.labels.tags})
        if tag not in known:
            raise InputError(f"--tag {tag}: no run has this tag{did_you_mean(tag, known)}")
        chosen = [row for row in chosen if tag in row.labels.tags]
    records = {row: [each for each in row.records if _is_readable(each, skipped)] for row in rows if where}
    for condition in where:
        key, equals, value = condition.partition("=")
        if not equals:
            raise InputError(f"--where {condition}: must be KEY=VALUE, as in --where model=mlp")
        known_records = [record for found in records.values() for record in found]
        if not any(_has(record, key) for record in known_records):
            keys = ((*record.overrides_by_key, *record.settings) for record in known_records[:100])
            known = sorted({key for found in keys for key in found})
            raise InputError(f"--where {condition}: no run has recorded {key}{did_you_mean(key, known)}")
        chosen = [row for row in chosen if any(_equal(record.value(key), value) for record in records[row])]
    return [row for row in chosen if not states or row.state in states]


def as_cells(rows: Sequence[Row]) -> Cells:
    """Return a table of the rows."""
    cells = [["name", "state", "done", "monitor", "best", "last", "age", "size", "tags"]]
    for row in rows:
        values = [format_number(value) if math.isfinite(value) else "" for value in (row.best, row.last)]
        tags = " ".join([*row.labels.tags, *["(archived)"] * row.labels.archived])
        monitor, age = row.monitor.name if row.monitor else "", describe_age(time.time() - row.started)
        cells.append([row.name, row.state, row.done, monitor, *values, age, filesize.decimal(row.size), tags])
    return without_empty_columns(cells)


def describe_age(seconds: float) -> str:
    unit = next((unit for unit, size in UNITS_S.items() if seconds >= size), "s")
    return f"{max(0, int(seconds / UNITS_S[unit]))} {unit}"


def _row_of_run(record: RunRecord, folder: Path) -> Row:
    path, result = record.directory, {}
    if record.monitor is None and record.state not in DONE:  # result.json has no metrics yet
        result = read_result(path) or {}
    monitor = record.monitor or recorded_monitor(result, [str((result.get("monitor") or {}).get("name"))])
    best = last = math.nan
    if monitor is not None:
        best, last = record.best, record.metrics.get(monitor.name, math.nan)
        if not (math.isfinite(best) and math.isfinite(last)):
            curve = record.curves(monitor.name)[monitor.name]
            last = last if math.isfinite(last) else [math.nan, *curve.values()][-1]
            best = next((curve[step] for step in monitor.best(curve)), last)
    name, started = str(path).removeprefix(f"{folder}/"), started_at(path, record.started) or 0.0
    return Row(path, name, record.state, [record], started, monitor, best, last, read_labels(path))


def _state_order(state: str) -> int:
    return STATES.index(state) if state in STATES else len(STATES)


def _is_readable(record: RunRecord, skipped: list[str]) -> bool:
    try:
        return record.settings is not None  # reads the file
    except InputError as error:
        skipped.append(f"{record.directory} is skipped: {error}")
        return False


def _has(record: RunRecord, key: str) -> bool:
    return key == "world_size" or key in record.overrides_by_key or key in record.settings


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
