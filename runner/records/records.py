"""Finished and unfinished runs and sweeps as data. No configuration is composed, and no recorded code is imported."""

import functools
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from runner.errors import InputError
from runner.records.ledger import LEDGER, JobRecord, is_sweep, read_ledger, read_sweep
from runner.records.monitor import Monitor, recorded_monitor
from runner.records.record_files import parse_metrics, read_mapping, read_metrics, read_string_list
from runner.records.result import RESULT, valid_result
from runner.records.run_directory import CONFIG, OVERRIDES

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
    state: str  # as in result.json, or for a job as in the ledger of its sweep
    overrides: list[str] = field(default_factory=list)
    config_dirs: list[str] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)  # the resolved configuration, by dotted key
    metrics: dict[str, float] = field(default_factory=dict)
    monitor: Monitor | None = None  # None if the monitored metric was not measured
    world_size: int = 1
    starts_processes: bool = False  # True if its launcher starts the ranks
    error: str = ""
    code: str = ""  # the hash of its custom modules

    @functools.cached_property
    def overrides_by_key(self) -> dict[str, str]:
        return _by_key(self.overrides)

    def value(self, key: str) -> str:
        """Return the value of the key as text, from the overrides or the configuration."""
        if key == "world_size":
            return str(self.world_size)
        return self.overrides_by_key.get(key, to_text(self.settings[key]) if key in self.settings else "")

    def curve(self, metric: str) -> list[tuple[int, float]]:
        """Return the finite values of the metric by step. If a restart has repeated a step, the last value counts."""
        points: dict[int, float] = {}
        for line in read_metrics(self.directory):
            if math.isfinite(value := line.get(metric, math.nan)):
                points[line["step"]] = float(value)
        return sorted(points.items())


def read_jobs(
    path: Path,
    key: str,
    read_sweep_jobs: Callable[[Path], list[JobRecord]] = read_ledger,
    skipped: list[str] | None = None,
) -> list[RunRecord]:
    """Return the jobs of the sweep, or the single run, in the directory `path`, which the option `key` names.

    A job whose files are damaged is skipped, and a message is added to `skipped`. If `skipped` is None, InputError is
    raised, as it is for a directory without a sweep or run.
    """
    check_is_record(path, key)
    records = []
    for job in read_sweep_jobs(path) if is_sweep(path) else [single_run(path)]:
        try:
            list(read_metrics(job.directory))
            records.append(read_run(job))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            message = str(error) if isinstance(error, InputError) else f"{job.directory / RESULT} is damaged ({error})"
            if skipped is None:
                raise InputError(message) from None
            skipped.append(f"{job.label} is skipped: {message}")
    return records


def check_is_record(path: Path, key: str) -> None:
    """Raise InputError, which names the key, if the path is not the directory of a run or sweep."""
    if is_sweep(path) or (path / OVERRIDES).is_file():
        return
    what = f"no sweep or run (it has neither {LEDGER} nor {OVERRIDES})" if path.is_dir() else "no directory"
    raise InputError(f"{key}={path} is {what}; name one under outputs/, or run=last")


def single_run(path: Path) -> JobRecord:
    """Return a single run as a job record, with the values of a job that is in no ledger."""
    return JobRecord(0, path.name, [], path, state="")


def read_run(job: JobRecord) -> RunRecord:
    """Return the run of a job. Raises InputError if its files are damaged."""
    path = job.directory
    recorded = _read_overrides(path) or job.overrides
    config_dirs = [text.removeprefix("--config-dir=") for text in recorded if text.startswith("--config-dir=")]
    overrides = [text for text in recorded if not text.startswith("--")]
    if not (path / RESULT).exists():  # the job is waiting, or was refused
        return RunRecord(path, job.label, job.state or "not run", overrides, error=job.error or "")
    result = valid_result(read_mapping(path / RESULT))
    settings = dotted(read_mapping(path / CONFIG)) if (path / CONFIG).exists() else {}
    speed = {key: result.get(key) for key in ("samples_per_second", "seconds")}
    measured = {**parse_metrics(result.get("metrics")), **speed}
    metrics = {name: float(value) for name, value in measured.items() if isinstance(value, (int, float))}
    return RunRecord(
        directory=path,
        label=job.label,
        state=job.state or str(result.get("state", "")),
        overrides=overrides,
        config_dirs=config_dirs,
        settings=settings | {key: result[key] for key in ("model", "data", "parallel") if key in result},
        metrics=metrics,
        monitor=recorded_monitor(result, metrics),
        world_size=int(result.get("world_size", 1)),
        starts_processes=not str(settings.get("launcher._target_", "")).endswith(".Env"),
        error=str(job.error or result.get("error") or ""),
        code=str((result.get("code") or {}).get("hash") or ""),
    )


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
        overrides = _by_key([text for text in _read_overrides(directory) if not text.startswith("--")])
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


def newest_record(parent: Path) -> Path | None:
    """Return the newest sweep or run in a directory of sweeps and runs."""
    found = [path for name in (LEDGER, OVERRIDES) for path in parent.glob(f"*/{name}")]
    return max(found, key=lambda path: path.stat().st_ctime).parent if found else None


def newest_training_run(parent: Path) -> Path | None:
    """Return the newest run with task=train in a directory of runs.

    Raises InputError if the task of a newer run cannot be read, because it may be the newest training run.
    """
    found = [path.parent for path in parent.glob(f"*/{OVERRIDES}")]
    for path in sorted(found, key=lambda path: (path.stat().st_ctime, path), reverse=True):
        if (path / RESULT).exists() and read_mapping(path / RESULT).get("task") == "train":
            return path
    return None


def dotted(node: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested mappings and return the values by dotted key. An empty mapping counts as a value."""
    flat: dict[str, Any] = {}
    for key, value in node.items():
        is_nested = isinstance(value, Mapping) and value
        flat |= dotted(value, f"{prefix}{key}.") if is_nested else {f"{prefix}{key}": value}
    return flat


def _is_experimental(key: str) -> bool:
    return key.split(".")[0] not in LOCATION_KEYS


def _by_key(overrides: list[str]) -> dict[str, str]:
    parts = (text.partition("=") for text in overrides)
    return {key.lstrip("+"): value for key, equals, value in parts if equals}


def _read_overrides(path: Path) -> list[str]:
    return read_string_list(path / OVERRIDES) if (path / OVERRIDES).exists() else []


def to_text(value: Any) -> str:
    """Return the value of a key as it is written on the command line."""
    if isinstance(value, bool):
        return str(value).lower()
    return "null" if value is None else str(value)
