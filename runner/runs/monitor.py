"""The one metric by which runs are compared, and which end of it is the best."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

# Of records without a monitor, which an older version wrote, in the order in which they are looked for.
_BEFORE_MONITORS: tuple[tuple[str, Literal["max", "min"]], ...] = (("val/accuracy", "max"), ("val/loss", "min"))


@dataclass(frozen=True)
class Monitor:
    """A metric as it is logged, and its best end."""

    name: str
    direction: Literal["max", "min"]


def recorded_monitor(result: Mapping[str, Any], metrics: Collection[str]) -> Monitor | None:
    """The monitor of a result.json, of whose metrics these are the names; None where it has none of them.

    A monitor of the validation data stands for the same metric of another split, where only that was evaluated.
    """
    kept = result.get("monitor")
    if not isinstance(kept, Mapping) or kept.get("direction") not in ("max", "min"):
        return next((Monitor(name, end) for name, end in _BEFORE_MONITORS if name in metrics), None)
    name, measured = str(kept.get("name")), name_without_split(str(kept.get("name")))
    names = [name, *sorted(other for other in metrics if "/" in other and name_without_split(other) == measured)]
    found = next((other for other in names if other in metrics and not other.startswith("train/")), None)
    return Monitor(found, kept["direction"]) if found else None


def name_without_split(name: str) -> str:
    """f1/macro of val/f1/macro."""
    return name.partition("/")[2]
