"""Checks of the options that select parameters by patterns of their names: init_from, freeze and optimizer.groups."""

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from runner.config.diagnostics.signature import check_options
from runner.config.diagnostics.type_hints import show
from runner.config.schema import InitFrom

_MAP_EXAMPLE = "'[\"^module[.]->\"]'"
_GROUPS_EXAMPLE = "[{match: bias$, weight_decay: 0}]"


def check_patterns(init_from: InitFrom, freeze: Sequence[str]) -> list[str]:
    """Return one line per wrong value of init_from and freeze."""
    messages = []
    if init_from.path == "":
        messages.append("init_from.path= must be the path of a file or a run directory, or null")
    for index, entry in enumerate(init_from.map):
        key = f"init_from.map.{index}={entry}"
        if entry.count("->") != 1:
            messages.append(f"{key} must be a PATTERN->REPLACEMENT; for example init_from.map={_MAP_EXAMPLE}")
        elif message := _pattern_problem(entry.partition("->")[0]):
            messages.append(f"{key}: the part before -> {message}")
    problems = [(f"freeze.{index}={pattern}", _pattern_problem(pattern)) for index, pattern in enumerate(freeze)]
    return messages + [f"{key} {message}" for key, message in problems if message]


def check_optimizer_groups(node: Mapping[str, Any], provided: Collection[str]) -> list[str]:
    """Return one line per wrong entry, option or value of optimizer.groups; `node` is the optimizer's."""
    optimizer = dict(node)
    groups = optimizer.pop("groups", [])
    if not isinstance(groups, list):
        return [f"optimizer.groups={show(groups)} must be a list of parameter groups; for example {_GROUPS_EXAMPLE}"]
    messages = []
    for index, group in enumerate(groups):
        key = f"optimizer.groups.{index}"
        if not isinstance(group, Mapping) or "match" not in group:
            messages.append(f"{key}={show(group)} must be a mapping with match; for example {_GROUPS_EXAMPLE}")
            continue
        if message := _pattern_problem(group["match"]):
            messages.append(f"{key}.match={show(group['match'])} {message}")
        options = {name: value for name, value in group.items() if name != "match"}
        if "_target_" in options:  # another optimizer
            messages += check_options(key, options, provided)
            continue
        # With the other options of the optimizer, whose own problems are reported elsewhere.
        checked = check_options(key, {**optimizer, **options}, provided)
        begins = tuple(f"{key}.{name}{end}" for name in options for end in ("=", " ", "."))
        messages += [message for message in checked if message.startswith(begins)]
    return messages


def _pattern_problem(pattern: Any) -> str | None:
    """Return the end of a message, after key and value, if the pattern is no regular expression."""
    if not isinstance(pattern, str) or not pattern:
        return "must be a regular expression, as text; for example bias$"
    try:
        re.compile(pattern)
    except re.error as error:
        return f"must be a regular expression, but: {error}; write a literal dot or bracket as \\. or \\["
    return None
