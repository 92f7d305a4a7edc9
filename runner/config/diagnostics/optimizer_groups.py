"""Checks optimizer.groups: what is wrong with each entry by itself, before there is a model whose names it matches."""

import re
from collections.abc import Collection, Mapping
from typing import Any

from runner.config.diagnostics.signature import check_options
from runner.config.diagnostics.type_hints import show, show_quoted

_FORM = "[{match: bias$, weight_decay: 0}]"


def check_optimizer_groups(node: Mapping[str, Any], provided: Collection[str]) -> list[str]:
    """One line per wrong entry, option or value. node: the optimizer's, plain and resolved."""
    optimizer = dict(node)
    groups = optimizer.pop("groups", [])
    if not isinstance(groups, list):
        return [f"optimizer.groups={show(groups)} must be a list of groups of parameters; for example {_FORM}"]
    messages = []
    for index, group in enumerate(groups):
        key = f"optimizer.groups.{index}"
        if not isinstance(group, Mapping):
            messages.append(f"{key}={show_quoted(group)} must be a mapping of match and options; for example {_FORM}")
        elif "match" not in group:
            messages.append(f"{key}={show(group)} must have match, a regular expression on names; for example {_FORM}")
        elif message := wrong_pattern(group["match"]):
            messages.append(f"{key}.match={show_quoted(group['match'])} {message}")
        else:
            messages += _check_group(key, optimizer, group, provided)
    return messages


def wrong_pattern(pattern: Any) -> str | None:
    """What follows key and value where it is no regular expression."""
    if not isinstance(pattern, str) or not pattern:
        return "must be a regular expression, as text; for example bias$"
    try:
        re.compile(pattern)
    except re.error as error:
        return (
            f"must be a regular expression, but: {error}; a dot or bracket that is meant itself is written \\. or \\["
        )
    return None


def _check_group(
    key: str, optimizer: Mapping[str, Any], group: Mapping[str, Any], provided: Collection[str]
) -> list[str]:
    options = {name: value for name, value in group.items() if name != "match"}
    if own := [name for name in options if str(name).startswith("_") or name == "groups"]:
        return [
            f"{key}.{own[0]}={show_quoted(options[own[0]])}: a group has options of its optimizer only; take it out"
        ]
    # The group's options on top of the optimizer's are checked as those are; what is wrong with those is told there.
    begins = tuple(f"{key}.{name}{end}" for name in options for end in ("=", " ", "."))
    return [message for message in check_options(key, {**optimizer, **options}, provided) if message.startswith(begins)]
