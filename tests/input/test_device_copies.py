"""Batches that are copied to a GPU one ahead: their order, and errors in their turn. A GPU is not needed."""

from collections.abc import Callable, Iterator

import pytest

from runner.input.device_copies import one_ahead


def recorded(events: list[str], fails_at: int | None = None) -> Iterator[int]:
    def items() -> Iterator[int]:
        for number in range(3):
            if number == fails_at:
                raise ValueError(f"item {number}")
            events.append(f"read {number}")
            yield number

    def start(number: int) -> Callable[[], int]:
        events.append(f"start {number}")

        def finish() -> int:
            events.append(f"finish {number}")
            return number

        return finish

    return one_ahead(items(), start)


def test_the_next_item_is_started_before_the_current_one_is_used() -> None:
    events = list[str]()
    for number in recorded(events):
        events.append(f"use {number}")
    assert events[:6] == ["read 0", "start 0", "finish 0", "read 1", "start 1", "use 0"]
    assert events[6:] == ["finish 1", "read 2", "start 2", "use 1", "finish 2", "use 2"]


def test_an_error_is_raised_in_its_turn() -> None:
    events = list[str]()
    items = recorded(events, fails_at=1)
    assert next(items) == 0
    with pytest.raises(ValueError, match="item 1"):
        next(items)


def test_a_started_item_is_finished_if_the_iteration_ends_early() -> None:
    events = list[str]()
    items = recorded(events)
    assert next(items) == 0
    items.close()  # type: ignore[attr-defined]
    assert events[-2:] == ["start 1", "finish 1"]
    failing = recorded(events, fails_at=1)
    assert next(failing) == 0
    failing.close()  # type: ignore[attr-defined]
