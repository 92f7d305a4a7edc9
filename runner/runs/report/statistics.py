"""From jobs to a table: means over seeds, an order, and what each key did."""

import itertools
import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from runner.errors import InputError, did_you_mean
from runner.runs.monitor import BY_LOSS, Monitor
from runner.runs.records import RunRecord, ran, varied_keys

# In the names of metrics that are no job's monitor.
SMALL_IS_GOOD = ("loss", "error", "seconds", "time", "memory", "perplexity", "wait", "bytes", "mae", "mse")
MAX_VALUES = 8  # more numbers than these are told in ranges


@dataclass(frozen=True)
class Mean:
    """Of one metric over some jobs. `deviation` is the sample's, with n - 1; None for one value."""

    value: float
    deviation: float | None
    count: int

    def __str__(self) -> str:
        return show(self.value) + ("" if self.deviation is None else f" ± {show(self.deviation, like=self.value)}")


@dataclass(frozen=True)
class Row:
    """One configuration: jobs that are equal in everything but the seed."""

    values: dict[str, str]  # of the varied keys
    jobs: list[RunRecord]
    means: dict[str, Mean]

    @property
    def finished(self) -> list[RunRecord]:
        return ran(self.jobs)

    @property
    def name(self) -> str:
        return " ".join(f"{key}={value}" for key, value in self.values.items()) or self.jobs[0].label


@dataclass(frozen=True)
class Summary:
    """What there is to tell of some jobs."""

    jobs: list[RunRecord]
    keys: list[str]  # that vary, without the seed
    metric: str | None  # None where no job has finished with one
    descending: bool  # the best is the largest
    rows: list[Row]  # best first, then those without a value
    effects: dict[str, list[tuple[str, Mean]]] = field(default_factory=dict)  # key -> value -> mean over its rows
    monitors: list[Monitor] = field(default_factory=list)  # of the jobs; the first is the metric unless one was typed

    @property
    def best(self) -> Row | None:
        if not self.rows or self.metric is None or (mean := self.rows[0].means.get(self.metric)) is None:
            return None
        return self.rows[0] if math.isfinite(mean.value) else None  # they come last: there is no other

    @property
    def finished(self) -> list[RunRecord]:
        return ran(self.jobs)

    @property
    def unfinished(self) -> list[RunRecord]:
        return [job for job in self.jobs if job.state != "finished"]


def summarize(jobs: Sequence[RunRecord], metric: str | None = None, direction: str | None = None) -> Summary:
    """Group, average and sort. Raises InputError for a metric that no job has."""
    known = sorted({name for job in ran(jobs) for name in job.metrics})
    if metric is not None and metric not in known:
        hint = did_you_mean(metric, known) or "; no job has finished with any"
        raise InputError(f"report.metric={metric}: no such metric{hint}")
    monitors = monitors_of(jobs)
    metric = metric or (monitors[0].name if monitors else next(iter(known), None))
    direction = direction or next((monitor.direction for monitor in monitors if monitor.name == metric), None)
    descending = direction == "max" if direction else not any(word in (metric or "") for word in SMALL_IS_GOOD)
    keys = [key for key in varied_keys(jobs) if key != "seed"]
    groups: dict[tuple[str, ...], list[RunRecord]] = {}
    for job in jobs:
        groups.setdefault(tuple(job.value(key) for key in keys), []).append(job)
    rows = [_row(dict(zip(keys, values, strict=True)), group) for values, group in groups.items()]

    def order(row: Row) -> tuple[bool, float]:
        mean = row.means.get(metric or "")
        if mean is None or not math.isfinite(mean.value):
            return True, 0.0
        return False, -mean.value if descending else mean.value

    rows.sort(key=order)
    effects = {key: _effect(rows, key, metric) for key in keys} if metric else {}
    return Summary(list(jobs), keys, metric, descending, rows, effects, monitors)


def monitors_of(jobs: Sequence[RunRecord]) -> list[Monitor]:
    """Those of the finished jobs, first one whose metric all of them have, or else the loss if they have that."""
    finished = ran(jobs)
    counts = Counter(job.monitor for job in finished if job.monitor is not None)
    shared = [monitor for monitor in (*counts, BY_LOSS) if all(monitor.name in job.metrics for job in finished)]
    if counts and shared == [BY_LOSS]:
        counts[BY_LOSS] += 0  # none of theirs is to be had of all, and so they are compared by this one
    return sorted(counts, key=lambda monitor: (monitor not in shared, -counts[monitor]))


def mean_of(values: Sequence[float]) -> Mean:
    """Raises ValueError where there are none."""
    mean = statistics.fmean(values)
    deviation = statistics.stdev(values) if len(values) > 1 and all(map(math.isfinite, values)) else None
    return Mean(mean, deviation, len(values))


def as_number(text: str) -> float | None:
    """None where it is a word."""
    try:
        return float(text)
    except ValueError:
        return None


def show(value: float, like: float | None = None) -> str:
    """Four decimals, none of a large number, and more of a tiny one; as many as `like` gets."""
    size = abs(value if like is None else like)
    if not math.isfinite(value) or not math.isfinite(size):
        return str(value)
    if size >= 1000:
        return f"{value:,.0f}"
    if size >= 100:
        return f"{value:.1f}"
    return f"{value:.4f}" if size >= 0.001 or value == 0 else f"{value:.4g}"


def _row(values: dict[str, str], jobs: list[RunRecord]) -> Row:
    finished = ran(jobs)
    names = sorted({name for job in finished for name in job.metrics})
    means = {name: mean_of([job.metrics[name] for job in finished if name in job.metrics]) for name in names}
    return Row(values, jobs, means)


def _effect(rows: Sequence[Row], key: str, metric: str) -> list[tuple[str, Mean]]:
    """The mean of the rows' means for each of the key's values, numbers in their order."""
    by_value: dict[str, list[float]] = {}
    for row in rows:
        if metric in row.means:
            by_value.setdefault(row.values[key], []).append(row.means[metric].value)
    numbers = {value: as_number(value) for value in by_value}
    if all(number is not None for number in numbers.values()):
        ordered = sorted(by_value, key=lambda value: numbers[value] or 0.0)
        if len(ordered) > MAX_VALUES:
            return _in_ranges(ordered, by_value)
        return [(value, mean_of(by_value[value])) for value in ordered]
    return [(value, mean_of(found)) for value, found in by_value.items()]


def _in_ranges(ordered: list[str], by_value: dict[str, list[float]], num_ranges: int = 4) -> list[tuple[str, Mean]]:
    """Of numbers that are nearly all different, as a sampler draws them: quarters, from the smallest on."""
    bounds = [len(ordered) * number // num_ranges for number in range(num_ranges + 1)]
    parts = [ordered[low:high] for low, high in itertools.pairwise(bounds)]
    return [(f"{part[0]} to {part[-1]}", mean_of([v for value in part for v in by_value[value]])) for part in parts]
