"""Whether this process is in the middle of a run: it is a part of one world at a time."""

from collections.abc import Iterator
from contextlib import contextmanager

_entered: list[str] = []


@contextmanager
def occupied() -> Iterator[None]:
    """Meanwhile nothing in this process may start another run."""
    _entered.append("")
    try:
        yield
    finally:
        _entered.pop()


def is_occupied() -> bool:
    """Whether it is asked from within a run, by a model, data or a callback."""
    return bool(_entered)
