"""The options that a mode refuses, as data, from which messages, --help and a table of the docs are written."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from runner.config.diagnostics.type_hints import show


@dataclass(frozen=True)
class Refusal:
    """A top-level option that does not work in a mode.

    Attributes:
        key: The dotted key of the option.
        reason: What is wrong, with `{setting}` for KEY=VALUE.
        fix: What to do instead; may be empty.
        values: The refused values. By default, these are all values that enable the option.
        given: The option of the mode that causes the refusal, such as `updates=async`; empty if the mode itself does.
    """

    key: str
    reason: str
    fix: str = ""
    values: tuple[object, ...] = ()
    given: str = ""

    def of_axis(self, mode: str, axis: str) -> "Refusal":
        """Return this refusal for a mesh, whose messages name an axis instead of the mode."""
        return replace(self, reason=self.reason.replace(mode, axis))

    def applies(self, value: object, options: Mapping[str, Any]) -> bool:
        """Return True if this value of the key is refused, with these options of the mode."""
        option, _, chosen = self.given.partition("=")
        if option and show(options.get(option)) != chosen:
            return False
        return value in self.values if self.values else value not in (None, False, "none")

    def message(self, value: str) -> str:
        """Return the message for a value of the option, given as on the command line."""
        reason = self.reason.replace("{setting}", f"{self.key}={value}")
        return f"{reason}; {self.fix}" if self.fix else reason

    def describe(self) -> str:
        """Return the message for all refused values."""
        return self.message(" or ".join(map(show, self.values)) or "VALUE")
