"""Named points of what is written to the disk: tests let a process die there."""

from collections.abc import Callable

watchers: list[Callable[[str], None]] = []  # empty unless a test appends one, in the process that it watches


def reached(name: str) -> None:
    """Tell whoever watches that the process has come to this point."""
    for watch in watchers:
        watch(name)
