"""JSON as every program reads it: a number that is not finite is written as null, and read as NaN again."""

import json
import math
from collections.abc import Mapping
from typing import Any


def dumps(value: Any, **options: Any) -> str:
    """As json.dumps, with null for what is not finite, of which JSON has no number."""
    try:
        return json.dumps(value, allow_nan=False, **options)
    except ValueError:  # some is; or the value holds itself, which the next call says
        return json.dumps(_without_nan(value), allow_nan=False, **options)


def numbers(metrics: Any) -> dict[str, float]:
    """The metrics of a line or a record, null being NaN; what is no number is left out."""
    if not isinstance(metrics, Mapping):
        return {}
    found = {name: math.nan if value is None else value for name, value in metrics.items()}
    return {name: value for name, value in found.items() if isinstance(value, (int, float))}


def _without_nan(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: _without_nan(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_nan(inner) for inner in value]
    return value
