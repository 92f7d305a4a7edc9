"""The rules that values of the configuration follow."""

import math
from dataclasses import dataclass
from typing import Any

from runner.config.diagnostics.type_hints import show
from runner.errors import near_hint


@dataclass(frozen=True)
class AtLeast:
    """The finite numbers from `least` on, or one of the words; for a list, one or more of these numbers."""

    least: int
    words: tuple[str, ...] = ()

    def problem(self, key: str, value: Any) -> str | None:
        """Return why the value of the key is not valid; None if it is valid, or null without `words`."""
        if (value is None and not self.words) or self._includes(value):
            return None
        if self.words:
            return f"{key}={show(value)} must be {', '.join(self.words)} or n of at least {self.least}"
        if isinstance(value, list):
            return f"{key}={value} must list numbers of at least {self.least}; try [{self.least}]"
        return f"{key}={value} must be {'finite' if value == math.inf else f'at least {self.least}'}"

    def _includes(self, value: Any) -> bool:
        if self.words:
            return value in self.words or (type(value) is int and value >= self.least)
        numbers = value if isinstance(value, list) else [value]
        return bool(numbers) and all(
            isinstance(each, int | float) and self.least <= each < math.inf for each in numbers
        )


@dataclass(frozen=True)
class Between:
    """The numbers between two limits, which are not valid themselves. `example` is a valid value."""

    low: float
    high: float
    example: str

    def problem(self, key: str, value: Any) -> str | None:
        """Return why the value of the key is not valid; None if it is valid or null."""
        if value is None or self.low < value < self.high:
            return None
        limits = f"above {self.low} and {'finite' if self.high == math.inf else f'below {self.high}'}"
        return f"{key}={value:g} must be {limits}, or null; try {self.example}"


@dataclass(frozen=True)
class OneOf:
    """The only valid values."""

    choices: tuple[Any, ...]

    def problem(self, key: str, value: Any) -> str | None:
        """Return why the value of the key is not valid; None if it is valid."""
        if any(value == choice and type(value) is type(choice) for choice in self.choices):
            return None
        names = list(map(show, self.choices))
        return f"{key}={show(value)} must be one of {', '.join(names)}{near_hint(show(value), names)}"


Rule = AtLeast | Between | OneOf
