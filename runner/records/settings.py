"""The recorded configurations and overrides of many runs.

Each distinct section of config.yaml, a top-level key with its value, is parsed once: most runs share sections, and
parsing a whole file takes 30 times as long as to look up its sections.
"""

import functools
import os
import re
from collections import ChainMap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import yaml

from runner.records.run_files import SAFE_LOADER, read_bytes, read_mapping, read_string_list

CONFIG, OVERRIDES = "config.yaml", "overrides.yaml"
CONFIG_DIR = "--config-dir="
_SECTION = re.compile(r"\n(?=[^\s-])")

Section = Mapping[str, Any]  # values by dotted key; several runs may have the same object


def read_settings(path: Path | str, chosen: Section) -> Section:
    """Return the values in a config.yaml, if it exists, updated with `chosen`. Raises InputError if it is damaged."""
    try:
        text = read_bytes(path).decode()
    except FileNotFoundError:
        return chosen
    except (OSError, ValueError):
        text = ""
    sections = [_parse_section(part) for part in _SECTION.split(text)]
    if not all(sections):  # not in the format of the runner
        return {**dotted(read_mapping(path)), **chosen}
    return ChainMap(cast(dict[str, Any], chosen), *sections)


def read_overrides(path: Path | str) -> list[str]:
    """Return the list of strings in an overrides.yaml; empty if it is missing. Raises InputError if it is damaged."""
    return read_string_list(path) if os.path.exists(path) else []


def split_words(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the overrides and the custom directories (`--config-dir=`) among the words of a command."""
    directories = [word.removeprefix(CONFIG_DIR) for word in words if word.startswith(CONFIG_DIR)]
    return [word for word in words if not word.startswith("--")], directories


def by_key(overrides: Sequence[str]) -> dict[str, str]:
    """Return the values of the overrides by key, without those that delete a key."""
    parts = (text.partition("=") for text in overrides)
    return {key.lstrip("+"): value for key, equals, value in parts if equals}


def to_text(value: Any) -> str:
    """Return the value of a key as it is written on the command line."""
    if isinstance(value, bool):
        return str(value).lower()
    return "null" if value is None else str(value)


def dotted(node: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested mappings and return the values by dotted key. An empty mapping counts as a value."""
    flat: dict[str, Any] = {}
    for key, value in node.items():
        is_nested = isinstance(value, Mapping) and value
        flat |= dotted(value, f"{prefix}{key}.") if is_nested else {f"{prefix}{key}": value}
    return flat


@functools.lru_cache(maxsize=2**14)
def _parse_section(text: str) -> dict[str, Any]:
    """Return the values of the section, or an empty dict if the text is not one key with its value."""
    if "*" in text:  # possibly an alias; read_mapping limits their number
        return {}
    try:
        found = yaml.load(text, Loader=SAFE_LOADER)
        return dotted(found) if isinstance(found, dict) and len(found) == 1 else {}
    except (ValueError, RecursionError, yaml.YAMLError):
        return {}
