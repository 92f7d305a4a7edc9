"""What sweeps and runs have left behind, read as data: nothing that is named in a directory is composed or imported."""

import functools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from runner.errors import InputError
from runner.runs.ledger import LEDGER, JobRecord, is_sweep, read_ledger, read_sweep
from runner.runs.monitor import Monitor, recorded_monitor
from runner.runs.run_directory import CONFIG, METRICS, OVERRIDES, RESULT
from runner.runs.shapes import read_lines, read_mapping, read_words
from runner.runs.strict_json import numbers

# What says where a job ran or was kept, and not what was tried.
PLACING = ("name", "outputs", "run", "resume", "hydra", "task", "threads", "logger")


@dataclass(frozen=True)
class Trial:
    """What makes a job different from the others of its sweep, and a run by itself from one without options."""

    words: dict[str, str]
    varied: dict[str, list[str]]  # the values that each key has in the sweep; none of a run by itself
    metrics: tuple[str, ...] = ()  # that an evaluation of it gives, the monitor first


@dataclass(frozen=True, eq=False)
class RunRecord:
    """One run: a job of a sweep, or one by itself."""

    directory: Path
    label: str
    state: str  # as in result.json, and as in the ledger of its sweep
    typed: list[str] = field(default_factory=list)
    config_dirs: list[str] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)  # the whole configuration, keys dotted
    metrics: dict[str, float] = field(default_factory=dict)
    monitor: Monitor | None = None  # None where it has none of the metrics that it could be
    world_size: int = 1
    starts_processes: bool = False  # by a launcher of its own
    error: str = ""

    @functools.cached_property
    def words(self) -> dict[str, str]:
        """What was typed, by key."""
        return _by_key(self.typed)

    def value(self, key: str) -> str:
        """What the job had under the key, whether it was typed or not."""
        if key == "world_size":
            return str(self.world_size)
        return self.words.get(key, _show(self.settings[key]) if key in self.settings else "")

    def curve(self, metric: str) -> list[tuple[int, float]]:
        """The metric by step, the last value of a step that a restart has made twice."""
        points: dict[int, float] = {}
        for line in lines_of(self.directory):
            value = line.get(metric)
            if isinstance(value, (int, float)) and math.isfinite(value):
                points[int(line["step"])] = float(value)
        return sorted(points.items())


def read_jobs(
    path: Path,
    key: str,
    read_sweep_jobs: Callable[[Path], list[JobRecord]] = read_ledger,
    left_out: list[str] | None = None,
) -> list[RunRecord]:
    """The jobs of a sweep's directory, or the one of a run's. Raises InputError that names the key for another one.

    read_sweep_jobs: what becomes of a sweep's jobs, where more than its ledger is asked. left_out: has a line more for
    each that is left out, as its files are not what a run records; without it the first such file is an InputError.
    """
    if is_sweep(path):
        found = [(job.directory, job.overrides, job.label, job) for job in read_sweep_jobs(path)]
        return [run for each in found for run in _read_or_leave_out(left_out, *each)]
    if (path / OVERRIDES).is_file():
        return _read_or_leave_out(left_out, path, [], path.name)
    what = f"no sweep or run (it has neither {LEDGER} nor {OVERRIDES})" if path.is_dir() else "no directory"
    raise InputError(f"{key}={path} is {what}; name one under outputs/, or run=last")


def read_run(path: Path) -> RunRecord:
    """A run by itself, or a job without what the ledger of its sweep says.

    Raises InputError that names a file which is not what a run records.
    """
    return _read(path, _overrides(path), path.name)


def varied_keys(jobs: Sequence[RunRecord]) -> list[str]:
    """The keys that make jobs different from one another, in the order in which they were typed."""
    typed = dict.fromkeys(key for job in jobs for key in job.words if key.split(".")[0] not in PLACING)
    keys = [key for key in typed if len({job.value(key) for job in jobs}) > 1]
    if not any(key.startswith("launcher.") for key in keys) and len({job.world_size for job in ran(jobs)}) > 1:
        keys.append("world_size")
    return keys


def read_trial(directory: Path) -> Trial:
    """Of a run, or of a job in its sweep's directory."""
    if is_sweep(directory.parent):
        jobs = {job.directory: _by_key(job.overrides) for job in read_ledger(directory.parent)}
        own, values = jobs.get(directory, {}), defaultdict(set)
        for words in jobs.values():
            for key in own:
                values[key].add(words.get(key, ""))
        typed = _by_key(read_sweep(directory.parent).typed)
        # The seed also where all have one: it is what a sweep is most often extended by. And what was typed otherwise,
        # as an interval: the first trial of a study has nothing yet to differ from.
        varied = {
            key: sorted(found)
            for key, found in values.items()
            if len(found) > 1 or key == "seed" or typed.get(key, own[key]) != own[key]
        }
        return Trial({key: own[key] for key in varied}, varied)
    alone = _by_key([word for word in _overrides(directory) if not word.startswith("--")])
    return Trial({key: value for key, value in alone.items() if key.split(".")[0] not in PLACING}, {})


def ran(jobs: Sequence[RunRecord]) -> list[RunRecord]:
    """Those that have finished."""
    return [job for job in jobs if job.state == "finished"]


def last_of(folder: Path) -> Path | None:
    """The newest sweep or run in a folder of them."""
    found = [path for name in (LEDGER, OVERRIDES) for path in folder.glob(f"*/{name}")]
    return max(found, key=lambda path: path.stat().st_ctime).parent if found else None


def last_trained(folder: Path) -> Path | None:
    """The newest run in a folder of them whose task was to train.

    Raises InputError where that cannot be told of one: it may be the one that is meant.
    """
    found = [path.parent for path in folder.glob(f"*/{OVERRIDES}")]
    for path in sorted(found, key=lambda path: (path.stat().st_ctime, path), reverse=True):
        if (path / RESULT).exists() and read_mapping(path / RESULT).get("task") == "train":
            return path
    return None


def _read_or_leave_out(
    left_out: list[str] | None, path: Path, overrides: list[str], label: str, entry: JobRecord | None = None
) -> list[RunRecord]:
    try:
        for _ in lines_of(path):
            pass
        return [_read(path, overrides, label, entry)]
    except InputError as error:
        message = error.messages[0]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        message = f"{path / RESULT} is not what a run records ({error})"
    if left_out is None:
        raise InputError(message)
    left_out.append(f"{label} is left out: {message}")
    return []


def _read(path: Path, overrides: list[str], label: str, entry: JobRecord | None = None) -> RunRecord:
    """A run's own files, and what the sweep's ledger says of it."""
    recorded = _overrides(path) or overrides
    folders = [word.removeprefix("--config-dir=") for word in recorded if word.startswith("--config-dir=")]
    typed = [word for word in recorded if not word.startswith("--")]
    if not (path / RESULT).exists():  # it waits, or was refused
        return RunRecord(path, label, entry.state if entry else "not run", typed, error=(entry and entry.error) or "")
    result = read_mapping(path / RESULT)
    settings = _settings(path)
    own = {key: result.get(key) for key in ("samples_per_second", "seconds")}
    metrics = {k: float(v) for k, v in {**numbers(result.get("metrics")), **own}.items() if isinstance(v, (int, float))}
    return RunRecord(
        directory=path,
        label=label,
        state=entry.state if entry else str(result.get("state", "")),
        typed=typed,
        config_dirs=folders,
        settings=settings | {key: result[key] for key in ("model", "data", "parallel") if key in result},
        metrics=metrics,
        monitor=recorded_monitor(result, metrics),
        world_size=int(result.get("world_size", 1)),
        starts_processes=not str(settings.get("launcher._target_", "")).endswith(".Env"),
        error=str((entry and entry.error) or result.get("error") or ""),
    )


def _by_key(words: list[str]) -> dict[str, str]:
    return {key.lstrip("+"): value for key, is_set, value in (word.partition("=") for word in words) if is_set}


def _overrides(path: Path) -> list[str]:
    return read_words(path / OVERRIDES) if (path / OVERRIDES).exists() else []


def _settings(path: Path) -> dict[str, Any]:
    return dotted(read_mapping(path / CONFIG)) if (path / CONFIG).exists() else {}


def lines_of(directory: Path) -> Iterator[dict[str, Any]]:
    """What a run has logged, a line at a time. Raises InputError for a line that is not of a step."""
    try:
        for line in read_lines(directory / METRICS):
            if type(line.get("step")) is not int:
                raise InputError(f"{directory / METRICS}: {str(line)[:40]} has no step; remove the line")
            yield {name: math.nan if value is None else value for name, value in line.items()}
    except OSError:
        return


def _show(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return "null" if value is None else str(value)


def dotted(node: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The values in a node and in those that it holds, by dotted key; an empty node is a value."""
    flat: dict[str, Any] = {}
    for key, value in node.items():
        nested = isinstance(value, Mapping) and value
        flat |= dotted(value, f"{prefix}{key}.") if nested else {f"{prefix}{key}": value}
    return flat
