"""Rules that the schema declares for its keys: each key that may be a number has one, and other values are refused."""

import math
from operator import attrgetter
from typing import Any, get_args

import pytest

from runner.config import texts
from runner.config.diagnostics.type_hints import show
from runner.config.help.config_tree import ConfigTree
from runner.config.rules import AtLeast, Between, OneOf, Rule
from runner.config.schema import GROUPS, NAMED_GROUPS, RULES, SECTIONS, Config, as_config
from runner.config.validate import check_values
from runner.paths import CONF

TYPES = {key: kind for key, kind in texts._TYPES.items() if key not in (*GROUPS, *NAMED_GROUPS, *SECTIONS)}


def accepts_numbers(kind: Any) -> bool:
    return kind in (int, float) or any(map(accepts_numbers, get_args(kind)))


def test_every_key_that_may_be_a_number_has_a_rule() -> None:
    """Without a rule, max_minutes=-1 would be accepted. Add it to the key's type: Annotated[int, AtLeast(1)]."""
    assert [key for key, kind in TYPES.items() if accepts_numbers(kind) and key not in RULES] == []


def test_config_yaml_has_every_key_of_the_schema_with_its_default() -> None:
    written = {key.name: key.value.replace(", ", ",") for key in ConfigTree([CONF]).main.keys}
    assert written == {key: show(attrgetter(key)(Config())) for key in TYPES}


def excluded_values(key: str, rule: Rule) -> list[Any]:
    if isinstance(rule, OneOf):
        return ["neither", 3.5]
    values = [rule.least - 1, math.inf] if isinstance(rule, AtLeast) else [rule.low, rule.high, math.nan]
    return [[value] for value in values] if TYPES[key] == list[int] else values


@pytest.mark.parametrize(("key", "rule"), RULES.items())
def test_values_that_the_rule_excludes_are_refused(key: str, rule: Rule) -> None:
    section, _, name = key.rpartition(".")
    for value in excluded_values(key, rule):
        messages = check_values(as_config({section: {name: value}} if section else {name: value}))
        assert any(message.startswith(f"{key}=") and " must " in message for message in messages), value


def test_examples_of_messages_are_valid() -> None:
    for key, rule in RULES.items():
        if isinstance(rule, Between):
            assert rule.low < float(rule.example) < rule.high, key
