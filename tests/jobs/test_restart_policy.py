"""When a failed world is restarted, and when it is given up."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from runner.jobs.restart_policy import FailedStart, FailureReport, refusal
from runner.records.attempts import Attempt, append_attempt

DIED = "rank 1 on here died: SIGKILL"


def starts_of(*starts: tuple[int, str]) -> list[FailedStart]:
    return [FailedStart(step, failure) for step, failure in starts]


@pytest.mark.parametrize(
    ("starts", "step", "max_restarts", "reason"),
    [
        ([(0, DIED), (5, DIED), (9, DIED), (9, "rank 0 on here died: SIGSEGV")], 12, 2, None),
        ([(0, DIED)], 5, 0, "max_restarts=0 reached, without getting beyond step 5"),
        (
            [(0, DIED), (5, "rank 0 on here died: SIGKILL")],
            5,
            1,
            "max_restarts=1 reached, without getting beyond step 5",
        ),
        ([(0, DIED), (0, DIED)], 0, 3, "failed twice in the same way, without getting beyond the beginning"),
        ([(0, DIED), (5, DIED), (9, DIED)], 9, 3, "failed twice in the same way, without getting beyond step 9"),
    ],
)
def test_a_world_is_restarted_while_it_makes_progress(
    starts: Sequence[tuple[int, str]], step: int, max_restarts: int, reason: str | None
) -> None:
    found = refusal(starts_of(*starts), step, max_restarts)
    assert found is None if reason is None else reason in (found or "")


def test_the_same_failure_may_be_reported_by_another_rank_and_other_failures_may_end_in_the_same_line() -> None:
    def start(rank: int, error: str, pid: int) -> FailedStart:
        calls = 'Traceback (most recent call last):\n  File "a.py", line 1, in f\n    g()\n'
        silent = f"no response from rank 3 on here: its process {pid} has exited"
        return FailedStart(5, f"rank {rank} on here:\n{calls}RuntimeError: {error}\nFor debugging, see there\n{silent}")

    first, again, other = start(0, "out of range", 7), start(1, "out of range", 8), start(0, "uncorrectable", 9)
    assert "twice in the same way" in (refusal([first, again], 5, 9) or "")
    assert refusal([first, other], 5, 9) is None


def test_only_the_newest_start_is_reported(tmp_path: Path) -> None:
    report = FailureReport(lambda: str(tmp_path))
    assert report.read() == ""
    (tmp_path / "result.json").write_text(json.dumps({"state": "failed", "error": "of the first"}))
    assert report.read() == "of the first"
    report = FailureReport(lambda: str(tmp_path))
    assert report.read() == ""
    # A start that fails before its first step leaves result.json unchanged.
    append_attempt(tmp_path, Attempt(2, state="failed", error="of the second"))
    assert report.read() == "of the second"
