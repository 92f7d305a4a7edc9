"""Regular expressions of the full names of parameters: their matches, and the names in messages about them."""

import re
from collections.abc import Sequence

from torch import nn

from runner.errors import nearest


def names_of(parameters: Sequence[tuple[str, nn.Parameter]]) -> dict[nn.Parameter, list[str]]:
    """Return all names of each parameter: several if modules share it."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in parameters:
        names.setdefault(parameter, []).append(name)
    return names


def first_match(patterns: Sequence[str], names: Sequence[str]) -> int | None:
    """Return the index of the first pattern that matches one of a parameter's names, or None."""
    matching = (n for n, pattern in enumerate(patterns) if any(re.search(pattern, name) for name in names))
    return next(matching, None)


def near(pattern: str, known: Sequence[str]) -> str:
    """Return the end of a message: the names that are similar to the pattern, or else the first names."""
    pieces = dict.fromkeys(piece for name in known for piece in (name, *name.split(".")))
    like = nearest(re.sub(r"[\^$\\*+?()]", "", pattern), list(pieces))
    alike = [name for name in known if like is not None and like in (name, *name.split("."))]
    return f"near it: {listed(alike)}" if alike else f"the names are {listed(known)}"


def listed(names: Sequence[str], most: int = 4) -> str:
    return ", ".join(names[:most]) + (", ..." if len(names) > most else "")


def counted(names: Sequence[str], most: int, between: str = ", ") -> str:
    """Return the first names, and the number of the others."""
    return between.join(names[:most]) + (f" and {len(names) - most:,} more" if len(names) > most else "")
