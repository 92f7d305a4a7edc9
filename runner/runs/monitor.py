"""The one metric by which runs are compared, and which end of it is the best."""

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

LOSS = "val/loss"  # which every evaluation gives

# Of records without a monitor, which an older version wrote, in the order in which they are looked for.
_BEFORE_MONITORS: tuple[tuple[str, Literal["max", "min"]], ...] = (("val/accuracy", "max"), (LOSS, "min"))


@dataclass(frozen=True)
class Monitor:
    """A metric as it is logged, and its best end."""

    name: str
    direction: Literal["max", "min"]

    def best(self, values: Mapping[int, float]) -> list[int]:
        """The steps of these values, the best first, of equal ones the earlier; without those that are no number."""
        sign = -1.0 if self.direction == "max" else 1.0
        known = [step for step, value in values.items() if math.isfinite(value)]
        return sorted(known, key=lambda step: (sign * values[step], step))

    def improves(self, value: float, on: float, by: float = 0.0) -> bool:
        """Whether it is better than the other one by more than so much; nothing is better than no number at all."""
        gain = value - on if self.direction == "max" else on - value
        return math.isfinite(value) and (not math.isfinite(on) or gain > by)


BY_LOSS = Monitor(LOSS, "min")


def recorded_monitor(result: Mapping[str, Any], metrics: Collection[str]) -> Monitor | None:
    """The monitor of a result.json, of whose metrics these are the names; None where it has none of them.

    A monitor of the validation data stands for the same metric of another split, where only that was evaluated.
    """
    kept = result.get("monitor")
    if not isinstance(kept, Mapping) or kept.get("direction") not in ("max", "min"):
        return next((Monitor(name, end) for name, end in _BEFORE_MONITORS if name in metrics), None)
    name = str(kept.get("name"))
    measured = name_without_split(name)
    names = [name, *sorted(other for other in metrics if name_without_split(other) == measured)]
    found = next((other for other in names if other in metrics), None)
    return Monitor(found, kept["direction"]) if found else None


def shown(monitors: Iterable[Monitor], known: Collection[str]) -> list[str]:
    """What a line or a table has room for: of the known metrics those that are monitored, and the loss."""
    names = dict.fromkeys([*(monitor.name for monitor in monitors), LOSS])
    return [name for name in names if name in known]


def evaluated(known: Iterable[str]) -> list[str]:
    """Those of the metrics that an evaluation gave, without the parts of one, as val/f1/class_0."""
    return [name for name in known if name.startswith(("val/", "test/")) and name.count("/") == 1]


def name_without_split(name: str) -> str:
    """f1/macro of val/f1/macro."""
    return name.partition("/")[2]
