"""The record of interruptions: the cause, the seconds lost, and the time between attempts that counts."""

from pathlib import Path

from runner.records.attempts import ATTEMPTS, Attempt, append_attempt, read_attempts, seconds_of
from runner.records.interruptions import Interruption, describe_interruptions, read_interruptions, record_interruption


def add(path: Path, number: int, started: str, ended: str, **fields: object) -> None:
    day = "2026-11-22T{}+00:00"
    values = {"first_step": 0, "state": "failed", **fields}
    append_attempt(path, Attempt(number, started=day.format(started), ended=day.format(ended), **values))


def test_time_between_attempts_counts_if_the_same_command_continues(tmp_path: Path) -> None:
    add(tmp_path, 1, "01:00:00", "01:00:30")
    add(tmp_path, 2, "01:00:40", "01:01:00", continues=True)
    add(tmp_path, 3, "05:00:00", "05:00:10")
    assert seconds_of(tmp_path) == 70
    next_one = Attempt(4, started="2026-11-22T05:00:15+00:00", continues=True)
    assert seconds_of(tmp_path, next_one) == 75


def test_no_second_is_lost_twice(tmp_path: Path) -> None:
    """A run is killed twice after the same step: the second time, only what followed the first loss is lost."""
    add(tmp_path, 1, "01:00:00", "01:00:30", state="killed", first_step=None)
    record_interruption(tmp_path, 2, step=10, elapsed_s=35.0, kept_s=20.0)
    add(tmp_path, 2, "01:00:30", "01:00:50", error="RuntimeError: no")
    record_interruption(tmp_path, 3, step=10, elapsed_s=55.5, kept_s=20.0)
    record_interruption(tmp_path, 3, step=12, elapsed_s=60.0, kept_s=58.0, cause="1 joined")
    found = [*read_interruptions(tmp_path)]
    assert [(each.step, each.cause, each.lost_s) for each in found] == [
        (10, "killed", 15.0),
        (10, "RuntimeError: no", 20.5),
        (12, "1 joined", 2.0),
    ]
    assert [attempt.number for attempt in read_attempts(tmp_path)] == [1, 2], "other lines are no attempts"


def test_a_run_that_was_not_interrupted(tmp_path: Path) -> None:
    record_interruption(tmp_path, 1, step=0, elapsed_s=1.0, kept_s=0.0)
    add(tmp_path, 1, "01:00:00", "01:00:30", first_step=None)  # it failed before its first step
    record_interruption(tmp_path, 2, step=0, elapsed_s=1.0, kept_s=0.0)
    add(tmp_path, 2, "01:00:30", "01:01:00", state="finished")
    record_interruption(tmp_path, 3, step=10, elapsed_s=61.0, kept_s=59.0)  # a finished run is trained further
    assert [*read_interruptions(tmp_path)] == []


def test_only_the_newest_are_shown_and_damaged_lines_are_skipped(tmp_path: Path) -> None:
    assert describe_interruptions(tmp_path) == ""
    add(tmp_path, 1, "01:00:00", "01:00:30", state="preempted")
    for number in range(7):
        record_interruption(tmp_path, 2, step=number, elapsed_s=10.0 * number, kept_s=0.0)
    with (tmp_path / ATTEMPTS).open("a") as file:
        file.write('{"attempt": 2, "step": "x", "cause": 3, "lost_s": null, "elapsed_s": 1}\n{"attempt"\n' + "[" * 9999)
    assert describe_interruptions(tmp_path).startswith("2 earlier; step 2: preempted (10.00 s lost); step 3")
    assert [*read_interruptions(tmp_path)][-1] == Interruption(2, 6, "preempted", 10.0, 60.0)
