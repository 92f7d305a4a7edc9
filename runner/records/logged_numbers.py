"""Comparison of the numbers that two runs have logged: whether they agree, and the first step at which they differ."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from runner.errors import InputError
from runner.records.monitor import LOSS
from runner.records.run_files import read_checksums, read_metrics
from runner.records.run_record import find_run

# torch.finfo(...).eps
EPS = {"fp64": 2.0**-52, "fp32": 2.0**-23, "fp16": 2.0**-10, "bf16": 2.0**-7, "float8": 2.0**-3}
# In training, differences by rounding start at a few EPS and grow, in runs of ConvNets by up to 7 times per step.
FACTOR, MAX_TOLERANCE = 100, 0.005
GROWTH, MAX_STEPS = 10, 4


@dataclass(frozen=True)
class MetricDifference:
    """The values of a metric in two runs, at one step."""

    step: int
    metric: str
    values: tuple[float, float]

    def __str__(self) -> str:
        return f"step {self.step}: {self.metric} was {self.values[0]!r}, is {self.values[1]!r}"

    @property
    def relative(self) -> float:
        """The difference divided by the larger absolute value; infinity if only one of the values is finite."""
        one, other = self.values
        if one == other or (math.isnan(one) and math.isnan(other)):
            return 0.0
        is_finite = math.isfinite(one) and math.isfinite(other)
        return abs(one - other) / max(abs(one), abs(other)) if is_finite else math.inf


@dataclass(frozen=True)
class NumberComparison:
    """The comparison of two runs in the steps that both have logged, up to the first step at which they differ."""

    num_steps: int
    largest: MetricDifference
    first_unexplained: MetricDifference | None = None  # by rounding; None if the runs agree
    allowed: float = 0.0  # the relative difference that rounding explains at that step
    agreed: int = 0  # the last compared step before it; 0 if none exists


def default_tolerance(precisions: Sequence[str]) -> float:
    """Return the tolerance of runs of these precisions, FACTOR * EPS of the lowest one, but at most MAX_TOLERANCE."""
    return min(FACTOR * max(EPS.get(precision, 0.0) for precision in precisions), MAX_TOLERANCE)


def compare_numbers(runs: tuple[Path, Path], tolerance: float, grows: bool = True) -> NumberComparison:
    """Compare what two runs have logged as train/NAME, without the metrics of the group `metrics`, and val/loss.

    Without `grows`, rounding explains a relative difference of `tolerance`. With `grows`, it explains the larger of
    `tolerance` and the largest difference so far, multiplied by GROWTH for each step since the last compared one, but
    for at most MAX_STEPS steps. For evaluations it then explains at least the square root of `tolerance`, because they
    depend on values that the loss of a step does not depend on, such as the statistics of BatchNorm.
    """

    def explained(difference: MetricDifference) -> float:
        is_evaluation = grows and difference.metric == LOSS
        return max(allowed, math.sqrt(tolerance)) if is_evaluation else allowed

    one, other = map(_logged, runs)
    largest, before, num_steps = MetricDifference(0, "", (0.0, 0.0)), 0, 0
    for step in sorted(one.keys() & other.keys()):
        both = [name for name in one[step] if name in other[step]]
        found = [MetricDifference(step, name, (one[step][name], other[step][name])) for name in both]
        if not found:
            continue
        num_steps += 1
        factor = GROWTH ** min(step - before, MAX_STEPS)
        allowed = max(tolerance, largest.relative) * factor if grows else tolerance
        largest = max(largest, *found, key=lambda difference: difference.relative)
        if unexplained := [difference for difference in found if difference.relative > explained(difference)]:
            worst = max(unexplained, key=lambda difference: difference.relative)
            return NumberComparison(num_steps, largest, worst, explained(worst), before)
        before = step
    return NumberComparison(num_steps, largest)


def describe_other_samples(runs: tuple[Path, Path]) -> list[str]:
    """Return lines about the first steps and the first evaluation, if the runs have read different samples in them."""
    lines = []
    for (one, other), noun in zip(zip(*map(read_checksums, runs), strict=True), ("step", "batch"), strict=True):
        both = sorted(one.keys() & other.keys())
        if different := [number for number in both if one[number] != other[number]]:
            where = "" if noun == "step" else " of the evaluation"
            more = f" and {len(different) - 1} more" if len(different) > 1 else ""
            lines.append(f"data: the samples, or their values, in {noun} {different[0]}{where}{more}")
    return lines


def check_comparable(runs: tuple[Path, Path]) -> None:
    """Raise InputError if one of the directories is not a training run, or if the runs were trained on other data."""
    records = [find_run(run) for run in runs]
    for key, run, record in zip(("run", "diff.with"), runs, records, strict=True):
        if record.task not in ("train", "rerun"):
            raise InputError(f"{key}={run} is a run of task={record.task}; task=diff compares training runs")
    (data, samples), (other_data, other_samples) = ((each.data, each.samples) for each in records)
    if (data, samples) != (other_data, other_samples):
        raise InputError(
            f"diff.with={runs[1]} was trained on data={other_data} with {_counts(other_samples)} samples, and "
            f"run={runs[0]} on data={data} with {_counts(samples)}; choose runs on the same data"
        )


def _counts(samples: Mapping[str, int]) -> str:
    return " and ".join(f"{count} {split}" for split, count in samples.items()) or "?"


def _logged(run: Path) -> dict[int, dict[str, float]]:
    """Return the compared values by step and name. If a restart has repeated a step, the last value is used.

    Metrics of the group `metrics`, such as accuracy, are left out, because a single sample near a decision boundary
    changes them by 1 / samples.
    """
    rows: dict[int, dict[str, float]] = {}
    for line in read_metrics(run):
        rows.setdefault(line["step"], {}).update(line)
    measured = {name.removeprefix("val/") for row in rows.values() for name in row if name.startswith("val/")}
    left_out = {f"train/{name}" for name in measured - {"loss"}}
    return {
        step: {name: row[name] for name in row if (name.startswith("train/") and name not in left_out) or name == LOSS}
        for step, row in rows.items()
    }
