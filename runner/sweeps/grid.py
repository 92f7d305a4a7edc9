"""Every combination of the values typed; keys that are zipped move together."""

import itertools
from collections.abc import Sequence
from typing import Any

from hydra.core.override_parser.types import Override

from runner.errors import InputError, did_you_mean


def combine(overrides: Sequence[Override], zipped: Any) -> list[list[str]]:
    """The jobs, each the words that make it. zipped: keys that move together, or a list of such lists.

    Raises InputError where a key cannot be zipped, and where there is no job.
    """
    values = {override.get_key_element(): _values(override) for override in overrides}
    axes: list[list[tuple[str, ...]]] = []  # of the grid: each entry's words are taken together
    groups = _groups(zipped, values)
    for key in values:
        group = next((group for group in groups if key in group), [key])
        if key == min(group, key=list(values).index):  # the group stands where its first key does
            axes.append(list(zip(*(values[member] for member in group), strict=True)))
    jobs = [[word for words in entry for word in words] for entry in itertools.product(*axes)]
    if not jobs:
        empty = next(override for override in overrides if not values[override.get_key_element()])
        raise InputError(f"{empty.input_line} has no values, so that there is no job; give one at least")
    return jobs


def _values(override: Override) -> list[str]:
    key = override.get_key_element()
    if not override.is_sweep_override():
        return [f"{key}={override.get_value_element_as_str()}"]
    if not override.is_discrete_sweep():
        raise InputError(f"{override.input_line}: a grid needs values; list them, or add hydra/sweeper=optuna")
    return [f"{key}={value}" for value in override.sweep_string_iterator()]


def _groups(zipped: Any, values: dict[str, list[str]]) -> list[list[str]]:
    if isinstance(zipped, str):
        raise InputError(f"hydra.sweeper.zip={zipped} must be a list of keys, as [optimizer.lr,batch_size]")
    groups = [list(zipped)] if zipped and isinstance(zipped[0], str) else [list(group) for group in zipped or ()]
    seen: list[str] = []
    for group in groups:
        typed = f"hydra.sweeper.zip=[{','.join(map(str, group))}]"
        if len(group) < 2:
            raise InputError(f"{typed} must name two keys at least; only several can move together")
        for key in group:
            if key not in values:
                raise InputError(f"{typed}: {key} has no values{did_you_mean(str(key), list(values))}")
            if key in seen:
                raise InputError(f"{typed}: {key} is named twice; keep one")
            seen.append(key)
        if len({len(values[key]) for key in group}) > 1:
            counts = ", ".join(f"{key} has {len(values[key])}" for key in group)
            raise InputError(f"{typed}: values that move together must be as many, but {counts}; make them equal")
    return groups
