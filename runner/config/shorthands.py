"""Two keys that one types without their section: `checkpoint=best` and `init_from=FILE`."""

from collections.abc import Sequence

SHORT_FOR = {"checkpoint": "checkpoint.load", "init_from": "init_from.path"}


def expand(overrides: Sequence[str]) -> list[str]:
    """The overrides with the whole keys; a section that is given as a mapping stays as it is."""
    words = []
    for word in overrides:
        key, is_set, value = word.partition("=")
        if is_set and key in SHORT_FOR and not value.lstrip().startswith("{"):
            key = SHORT_FOR[key]
        words.append(f"{key}{is_set}{value}")
    return words
