"""Finished and unfinished runs and sweeps as data. No configuration is composed, and no recorded code is imported."""

import functools
import math
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from pathlib import Path
from typing import Any

from runner.errors import InputError
from runner.records.ledger import LEDGER, JobRecord, is_sweep, read_ledger, read_sweep
from runner.records.monitor import Monitor, recorded_monitor
from runner.records.result import RESULT, current_state, valid_result
from runner.records.run_directory import CONFIG, OVERRIDES
from runner.records.run_files import parse_metrics, read_mapping, read_metrics
from runner.records.settings import Section, read_overrides, read_settings
from runner.records.start_time import in_order

DAMAGED = "damaged"  # the state of a job whose files cannot be read
CELLS = "cells"  # the directory of the runs of task=compare, in the directory of the task
MAX_LEVELS = 20  # of directories that are searched for runs
# Keys that only determine where a job ran or where it was stored.
LOCATION_KEYS = ("name", "outputs", "run", "resume", "hydra", "task", "threads", "logger")


@dataclass(frozen=True)
class Trial:
    """The overrides that distinguish a job from the others of its sweep, or a single run from one without overrides."""

    overrides: dict[str, str]  # by key
    varied: dict[str, list[str]]  # the values of each key in the sweep; empty for a single run
    metrics: tuple[str, ...] = ()  # the metrics of its evaluations, the monitored one first


@dataclass(frozen=True, eq=False)
class RunRecord:
    """One run: a job of a sweep, or a single run."""

    directory: Path
    label: str
    state: str  # as in result.json or, for a job, in its sweep's ledger; or lost
    overrides: list[str] = field(default_factory=list)
    config_dirs: list[str] = field(default_factory=list)
    chosen: dict[str, Any] = field(default_factory=dict)  # the options of groups that result.json names
    metrics: dict[str, float] = field(default_factory=dict)
    monitor: Monitor | None = None  # None if the monitored metric was not measured
    world_size: int = 1
    best: float = math.nan  # the best value of the monitor
    started: str = ""  # in UTC; empty if it is not recorded
    error: str = ""
    code: str = ""  # the hash of its custom modules

    @functools.cached_property
    def settings(self) -> Section:
        """The resolved configuration, by dotted key. Raises InputError if the file is damaged."""
        return read_settings(self.directory / CONFIG, self.chosen)

    @functools.cached_property
    def overrides_by_key(self) -> dict[str, str]:
        return _by_key(self.overrides)

    def value(self, key: str) -> str:
        """Return the value of the key as text, from the overrides or the configuration."""
        if key == "world_size":
            return str(self.world_size)
        if key in self.overrides_by_key:
            return self.overrides_by_key[key]
        return to_text(self.settings[key]) if key in self.settings else ""

    def curves(self, *metrics: str) -> dict[str, dict[int, float]]:
        """Return the finite values of each metric by step. If a restart has repeated a step, the last value counts."""
        curves: dict[str, dict[int, float]] = {metric: {} for metric in metrics}
        for line in sorted(read_metrics(self.directory, *metrics), key=itemgetter("step")):
            for metric, curve in curves.items():
                if math.isfinite(value := line.get(metric, math.nan)):
                    curve[line["step"]] = float(value)
        return curves


def read_jobs(
    path: Path, key: str, read_sweep_jobs: Callable[[Path], list[JobRecord]] = read_ledger, value: str = "best"
) -> list[RunRecord]:
    """Return the jobs of the sweep, or the single run, in the directory `path`, which the option `key` names.

    value: the evaluation, best or last, whose metrics the jobs have. A job whose files are damaged has the state
    damaged, and an error that names the file. Raises InputError for a directory without a sweep or run.
    """
    check_is_record(path, key)
    records = []
    for job in read_sweep_jobs(path) if is_sweep(path) else [single_run(path)]:
        try:
            last = read_run(job)
            best = _at_best(last)  # also if the last one is wanted: reads the file
            record = best if value == "best" else last
            _ = record.settings  # reads the file
            records.append(record)
        except (AttributeError, KeyError, OSError, OverflowError, RecursionError, TypeError, ValueError) as error:
            message = str(error) if isinstance(error, InputError) else f"{job.directory / RESULT} is damaged ({error})"
            records.append(RunRecord(job.directory, job.label, DAMAGED, job.overrides, error=message))
    return records


def check_is_record(path: Path, key: str) -> None:
    """Raise InputError, which names the key, if the path is not the directory of a run or sweep."""
    if (path / OVERRIDES).is_file() or is_sweep(path):
        return
    what = f"no sweep or run (it has neither {LEDGER} nor {OVERRIDES})" if path.is_dir() else "no directory"
    raise InputError(f"{key}={path} is {what}; name one under outputs/, or run=last")


def single_run(path: Path) -> JobRecord:
    """Return the job record of a single run, which is in no ledger."""
    return JobRecord(0, path.name, [], path, state="")


def read_run(job: JobRecord) -> RunRecord:
    """Return the run of a job. Raises InputError if its files are damaged."""
    path = job.directory
    recorded = read_overrides(f"{path}/{OVERRIDES}") or job.overrides  # a string: joining paths takes longer
    config_dirs = [text.removeprefix("--config-dir=") for text in recorded if text.startswith("--config-dir=")]
    overrides = [text for text in recorded if not text.startswith("--")]
    try:
        result = job.result or valid_result(read_mapping(f"{path}/{RESULT}"))
    except InputError:
        if (path / RESULT).exists():
            raise
        # The job is waiting, or was refused, or its directory was removed.
        return RunRecord(path, job.label, job.state or "not run", overrides, error=job.error or "")
    speed = {key: result[key] for key in ("samples_per_second", "seconds") if result.get(key) is not None}
    metrics = {name: float(value) for name, value in parse_metrics(result["metrics"] | speed).items()}
    return RunRecord(
        directory=path,
        label=job.label,
        state=job.state or current_state(path, result.get("state", "")),
        overrides=overrides,
        config_dirs=config_dirs,
        chosen={key: result[key] for key in ("model", "data", "parallel") if key in result},
        metrics=metrics,
        monitor=recorded_monitor(result, metrics),
        world_size=int(result.get("world_size", 1)),
        best=float(parse_metrics(result.get("best")).get("value", math.nan)),
        started=str(result.get("started") or ""),
        error=str(job.error or result.get("error") or ""),
        code=str((result.get("code") or {}).get("hash") or ""),
    )


def _at_best(job: RunRecord) -> RunRecord:
    """Return the job with the metrics of its best evaluation in place of those of the last one."""
    name = job.monitor.name if job.monitor else ""
    rows = {int(line["step"]): line for line in read_metrics(job.directory, name) if name in line}
    if job.monitor is None or not name.startswith("val/"):
        return job
    best = job.monitor.best({step: row[name] for step, row in rows.items()})
    found = rows[best[0]].items() if best else ()
    return replace(job, metrics=job.metrics | {name: value for name, value in found if name.startswith("val/")})


def varied_keys(jobs: Sequence[RunRecord]) -> list[str]:
    """Return the keys whose values differ between the jobs, in the order of the overrides."""
    keys = dict.fromkeys(key for job in jobs for key in job.overrides_by_key if _is_experimental(key))
    varied = [key for key in keys if len({job.value(key) for job in jobs}) > 1]
    varies_launcher = any(key.startswith("launcher.") for key in varied)
    has_world_sizes = len({job.world_size for job in finished_jobs(jobs)}) > 1
    return [*varied, "world_size"] if has_world_sizes and not varies_launcher else varied


def read_trial(directory: Path) -> Trial:
    """Return the trial of a single run, or of a job in its sweep's directory."""
    if not is_sweep(directory.parent):
        overrides = _by_key([text for text in read_overrides(directory / OVERRIDES) if not text.startswith("--")])
        return Trial({key: value for key, value in overrides.items() if _is_experimental(key)}, {})
    jobs = {job.directory: _by_key(job.overrides) for job in read_ledger(directory.parent)}
    overrides, values = jobs.get(directory, {}), defaultdict(set)
    for others in jobs.values():
        for key in overrides:
            values[key].add(others.get(key, ""))
    requested = _by_key(read_sweep(directory.parent).typed)
    # The seed is always included, because a sweep is most often extended by seeds. So is a key that has several values
    # in the command, because the first trial of a study is the only job so far.
    varied = {
        key: sorted(found)
        for key, found in values.items()
        if len(found) > 1 or key == "seed" or requested.get(key, overrides[key]) != overrides[key]
    }
    return Trial({key: overrides[key] for key in varied}, varied)


def finished_jobs(jobs: Sequence[RunRecord]) -> list[RunRecord]:
    return [job for job in jobs if job.state == "finished"]


def find_records(directory: Path | str, skipped: list[str] | None = None) -> Iterator[tuple[Path, bool]]:
    """Yield the path of each run and sweep at or below a directory, with True for a sweep. A sweep precedes its jobs.

    Links are not followed. Below a run, only the runs of task=compare are searched. A message about each directory that
    is not readable, or more than MAX_LEVELS levels below `directory`, is added to `skipped`.
    """
    stack, skipped = [(str(directory), 0)], [] if skipped is None else skipped
    while stack:
        path, level = stack.pop()
        try:
            with os.scandir(path) as found:
                entries = {entry.name: entry for entry in found}
        except OSError as error:
            if not isinstance(error, FileNotFoundError):  # not one that was removed meanwhile
                skipped.append(f"{path} is skipped: {error.strerror}")
            continue
        is_run = OVERRIDES in entries
        if is_run or LEDGER in entries:
            yield Path(path), LEDGER in entries
        searched = entries.values() if not is_run else [entries[CELLS]] if CELLS in entries else []
        below = [(entry.path, level + 1) for entry in searched if entry.is_dir(follow_symlinks=False)]
        if below and level == MAX_LEVELS:
            skipped.append(f"{path} is skipped: it has more than {MAX_LEVELS} parent directories in {directory}")
        else:
            stack += reversed(below)


def newest_record(parents: Iterable[Path], files: Sequence[str] = (LEDGER, OVERRIDES)) -> Path | None:
    """Return the newest subdirectory of `parents` that contains one of `files`, by default a sweep or a run."""
    found = {path.parent for parent in parents for name in files for path in parent.glob(f"*/{name}")}
    return in_order(found)[-1] if found else None


def newest_training_run(parents: Iterable[Path]) -> Path | None:
    """Return the newest run with task=train in the subdirectories of `parents`.

    Raises InputError if the task of a newer run cannot be read, because it may be the newest training run.
    """
    for path in reversed(in_order(path.parent for parent in parents for path in parent.glob(f"*/{OVERRIDES}"))):
        if (path / RESULT).exists() and read_mapping(path / RESULT).get("task") == "train":
            return path
    return None


def _is_experimental(key: str) -> bool:
    return key.split(".")[0] not in LOCATION_KEYS


def _by_key(overrides: list[str]) -> dict[str, str]:
    parts = (text.partition("=") for text in overrides)
    return {key.lstrip("+"): value for key, equals, value in parts if equals}


def to_text(value: Any) -> str:
    """Return the value of a key as it is written on the command line."""
    if isinstance(value, bool):
        return str(value).lower()
    return "null" if value is None else str(value)
