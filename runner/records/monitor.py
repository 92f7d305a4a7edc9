"""The monitored metric, by which runs are compared, and whether it is maximized or minimized."""

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

LOSS = "val/loss"  # logged by each evaluation
Direction = Literal["max", "min"]


@dataclass(frozen=True)
class Monitor:
    """The name of a metric as it is logged, and its direction."""

    name: str
    direction: Direction

    def best(self, values: Mapping[int, float]) -> list[int]:
        """Return the steps of the finite values, from the best to the worst value. Equal values are sorted by step."""
        sign = -1.0 if self.direction == "max" else 1.0
        finite = [step for step, value in values.items() if math.isfinite(value)]
        return sorted(finite, key=lambda step: (sign * values[step], step))

    def improves(self, value: float, on: float, by: float = 0.0) -> bool:
        """Return True if `value` is better than `on` by more than `by`. Finite values are better than others."""
        gain = value - on if self.direction == "max" else on - value
        return math.isfinite(value) and (not math.isfinite(on) or gain > by)


BY_LOSS = Monitor(LOSS, "min")


def recorded_monitor(recorded: Any, metrics: Collection[str]) -> Monitor | None:
    """Return the monitor that result.json names, or None if none of the `metrics` is the monitored one.

    If only another split was evaluated, the same metric of that split is the monitored one.
    """
    if not isinstance(recorded, Mapping) or recorded.get("direction") not in ("max", "min"):
        return None
    name = str(recorded.get("name"))
    suffix = name.partition("/")[2]  # f1/macro of val/f1/macro
    names = [name, *sorted(other for other in metrics if other.partition("/")[2] == suffix)]
    found = next((other for other in names if other in metrics), None)
    return Monitor(found, recorded["direction"]) if found else None


def main_metrics(monitors: Iterable[Monitor], known: Collection[str]) -> list[str]:
    """Return the monitored metrics and val/loss, if in `known`, for a line or a table with little space."""
    names = dict.fromkeys([*(monitor.name for monitor in monitors), LOSS])
    return [name for name in names if name in known]


def evaluation_metrics(known: Iterable[str]) -> list[str]:
    """Return the metrics of evaluations, without components such as val/f1/class_0."""
    return [name for name in known if name.startswith(("val/", "test/")) and name.count("/") == 1]
