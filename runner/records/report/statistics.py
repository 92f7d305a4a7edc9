"""Statistics of jobs: means over seeds or other keys, the order of the configurations, and the effect of each key."""

import itertools
import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from runner.errors import InputError, did_you_mean
from runner.records.compared_runs import finished_runs, varied_keys
from runner.records.ledger import is_sweep
from runner.records.monitor import BY_LOSS, Monitor
from runner.records.run_record import RunRecord
from runner.records.tables import as_number, format_number

MAX_VALUES, NUM_RANGES = 8, 4  # if a key has more than 8 numbers, they are grouped into 4 ranges


@dataclass(frozen=True)
class Mean:
    """The mean of a metric over jobs. `deviation` is the sample standard deviation (n - 1); None for one value."""

    value: float
    deviation: float | None
    count: int

    def __str__(self) -> str:
        if self.deviation is None:
            return format_number(self.value)
        return f"{format_number(self.value)} ± {format_number(self.deviation, like=self.value)}"

    def rounded(self) -> "Mean":
        """Return the mean and the deviation as integers, if they are finite."""
        parts = (self.value, self.deviation)
        value, deviation = (round(part) if part is not None and math.isfinite(part) else part for part in parts)
        assert value is not None
        return Mean(value, deviation, self.count)


@dataclass(frozen=True)
class ReportRow:
    """One configuration: jobs that differ only in the keys over which they are averaged."""

    values: dict[str, str]  # of the varied keys
    jobs: list[RunRecord]
    means: dict[str, Mean]

    @property
    def finished(self) -> list[RunRecord]:
        return finished_runs(self.jobs)

    @property
    def name(self) -> str:
        return " ".join(f"{key}={value}" for key, value in self.values.items()) or self.jobs[0].label


@dataclass(frozen=True)
class Summary:
    """The content of a report."""

    jobs: list[RunRecord]
    keys: list[str]  # the keys whose values vary, except those of `over`
    metric: str | None  # None if no job has finished with a metric
    direction: str | None  # max or min; None if no job knows which value of the metric is the best
    rows: list[ReportRow]  # sorted from the best, if there is a direction; rows without a value last
    # By key, each value with the mean over the rows that have it.
    effects: dict[str, list[tuple[str, Mean]]] = field(default_factory=dict)
    monitors: list[Monitor] = field(default_factory=list)  # of the jobs; see monitors_of
    over: Sequence[str] = ("seed",)  # the keys over which jobs are averaged
    missing: list[str] = field(default_factory=list)  # the configurations that the grid of a sweep lacks
    fill: list[str] = field(default_factory=list)  # the overrides with which the resumed sweep adds them

    @property
    def best(self) -> ReportRow | None:
        if not self.rows or self.metric is None or self.direction is None:
            return None
        if (mean := self.rows[0].means.get(self.metric)) is None:
            return None
        return self.rows[0] if math.isfinite(mean.value) else None  # non-finite values come last

    @property
    def finished(self) -> list[RunRecord]:
        return finished_runs(self.jobs)

    @property
    def unfinished(self) -> list[RunRecord]:
        return [job for job in self.jobs if job.state != "finished"]


def summarize(
    jobs: Sequence[RunRecord],
    metric: str | None = None,
    direction: str | None = None,
    over: Sequence[str] = ("seed",),
) -> Summary:
    """Group the jobs by configuration, average the metrics, and sort.

    over: the keys to average over. Raises InputError for a metric that no job has or whose direction is unknown, and
    for a key that does not vary.
    """
    finished = finished_runs(jobs)
    known = sorted({name for job in finished for name in job.measured})
    if metric is not None and metric not in known:
        hint = did_you_mean(metric, known) or "; no job has finished with a metric"
        raise InputError(f"report.metric={metric}: no such metric{hint}")
    monitors, is_requested = monitors_of(jobs), metric is not None
    metric = metric or (monitors[0].name if monitors else next(iter(known), None))
    direction = direction or _direction_of(metric or "", monitors, finished)
    if is_requested and direction is None:
        raise InputError(
            f"report.metric={metric}: cannot infer whether it is to be minimized or maximized; set "
            "report.direction=max or report.direction=min"
        )
    varied = varied_keys(jobs)
    if unknown := [key for key in over if key not in (*varied, "seed")]:
        hint = did_you_mean(unknown[0], varied) or "; the runs have equal overrides"
        raise InputError(f"report.over={unknown[0]}: the runs do not differ in this key{hint}")
    keys = [key for key in varied if key not in over]
    groups: dict[tuple[str, ...], list[RunRecord]] = {}
    for job in jobs:
        groups.setdefault(tuple(job.value(key) for key in keys), []).append(job)
    rows = [_row(dict(zip(keys, values, strict=True)), group) for values, group in groups.items()]

    def order(row: ReportRow) -> tuple[bool, float]:
        mean = row.means.get(metric or "")
        if mean is None or not math.isfinite(mean.value):
            return True, 0.0
        return False, {"max": -mean.value, "min": mean.value, None: 0.0}[direction]

    rows.sort(key=order)
    effects = {key: _effect(rows, key, metric) for key in keys} if metric else {}
    missing, fill = _holes(jobs, varied)
    return Summary(list(jobs), keys, metric, direction, rows, effects, monitors, over, missing, fill)


def _holes(jobs: Sequence[RunRecord], varied: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the missing configurations of a grid, and overrides with all of its values; both are empty without a grid.

    Jobs form a grid if they belong to one sweep and at least half of the combinations of their values exist.
    """
    values = {key: list(dict.fromkeys(job.overrides_by_key.get(key, "") for job in jobs)) for key in varied}
    exist = {tuple(job.overrides_by_key.get(key, "") for key in varied) for job in jobs}
    num_cells = math.prod(map(len, values.values()))
    is_sweep_of_all = len({job.directory.parent for job in jobs}) == 1 and is_sweep(jobs[0].directory.parent)
    if not is_sweep_of_all or num_cells > 2 * len(exist) or any("" in found for found in values.values()):
        return [], []
    cells = (cell for cell in itertools.product(*values.values()) if cell not in exist)
    missing = [" ".join(f"{key}={value}" for key, value in zip(varied, cell, strict=True)) for cell in cells]
    return missing, [f"{key}={','.join(found)}" for key, found in values.items()] if missing else []


def _direction_of(metric: str, monitors: Sequence[Monitor], jobs: Sequence[RunRecord]) -> str | None:
    """Return the direction of the monitor of this name, or else the one that the metric declared in a job."""
    directions = [monitor.direction for monitor in monitors if monitor.name == metric]
    return next(filter(None, [*directions, *(job.direction_of(metric) for job in jobs)]), None)


def monitors_of(jobs: Sequence[RunRecord]) -> list[Monitor]:
    """Return the monitors of the finished jobs, and val/loss, starting with the one that most jobs measured."""
    finished = finished_runs(jobs)
    counts = Counter(job.measured_monitor for job in finished if job.measured_monitor is not None)
    if counts:
        counts[BY_LOSS] += 0
    measured = {monitor: sum(monitor.name in job.measured for job in finished) for monitor in counts}
    return sorted(counts, key=lambda monitor: (-measured[monitor], -counts[monitor]))


def mean_of(values: Sequence[float]) -> Mean:
    """Return the mean and deviation of the values. Raises ValueError if there are none."""
    mean = statistics.fmean(values)
    deviation = statistics.stdev(values) if len(values) > 1 and all(map(math.isfinite, values)) else None
    return Mean(mean, deviation, len(values))


def _row(values: dict[str, str], jobs: list[RunRecord]) -> ReportRow:
    finished = finished_runs(jobs)
    names = sorted({name for job in finished for name in job.measured})
    means = {name: mean_of([job.measured[name] for job in finished if name in job.measured]) for name in names}
    return ReportRow(values, jobs, means)


def _effect(rows: Sequence[ReportRow], key: str, metric: str) -> list[tuple[str, Mean]]:
    """Return the mean of the rows' means for each value of the key; numbers are sorted."""
    by_value: dict[str, list[float]] = {}
    for row in rows:
        if metric in row.means:
            by_value.setdefault(row.values[key], []).append(row.means[metric].value)
    numbers = {value: as_number(value) for value in by_value}
    if all(number is not None for number in numbers.values()):
        by_value = dict(sorted(by_value.items(), key=lambda item: numbers[item[0]] or 0.0))
        if len(by_value) > MAX_VALUES:  # for example numbers that a sampler has drawn
            size, values = math.ceil(len(by_value) / NUM_RANGES), list(by_value)
            parts = [values[start : start + size] for start in range(0, len(values), size)]
            by_value = {f"{part[0]} to {part[-1]}": [mean for v in part for mean in by_value[v]] for part in parts}
    return [(value, mean_of(found)) for value, found in by_value.items()]
