"""When a failed world is restarted, and when it is given up."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from runner.launchers.elastic import refusal, reported_failure
from runner.records.result import result_mtime_ns

DIED = "rank 1 on here died: SIGKILL"


@pytest.mark.parametrize(
    ("failures", "step", "max_restarts", "reason"),
    [
        ([DIED, "rank 0 on here died: SIGSEGV"], 12, 2, None),
        ([DIED], 5, 0, "max_restarts=0 reached, without getting beyond step 5"),
        ([DIED, "rank 0 on here died: SIGKILL"], 5, 1, "max_restarts=1 reached, without getting beyond step 5"),
        ([DIED, DIED], 0, 3, "failed twice in the same way, without getting beyond the beginning"),
    ],
)
def test_a_world_is_restarted_unless_it_fails_in_the_same_way(
    failures: Sequence[str], step: int, max_restarts: int, reason: str | None
) -> None:
    found = refusal(failures, step, max_restarts)
    assert found is None if reason is None else reason in (found or "")


def test_the_same_failure_may_be_reported_by_another_rank_and_other_failures_may_end_in_the_same_line() -> None:
    def failure(rank: int, error: str, pid: int) -> str:
        calls = 'Traceback (most recent call last):\n  File "a.py", line 1, in f\n    g()\n'
        silent = f"no response from rank 3 on here: its process {pid} has exited"
        return f"rank {rank} on here:\n{calls}RuntimeError: {error}\nFor debugging, see there\n{silent}"

    first, again, other = failure(0, "out of range", 7), failure(1, "out of range", 8), failure(0, "uncorrectable", 9)
    assert "twice in the same way" in (refusal([first, again], 5, 9) or "")
    assert refusal([first, other], 5, 9) is None


def test_only_the_newest_start_is_reported(tmp_path: Path) -> None:
    before = result_mtime_ns(tmp_path)
    assert reported_failure(None, before) == reported_failure(str(tmp_path), before) == ""
    (tmp_path / "result.json").write_text(json.dumps({"state": "failed", "error": "of the first"}))
    assert reported_failure(str(tmp_path), before) == "of the first"
    assert reported_failure(str(tmp_path), result_mtime_ns(tmp_path)) == ""
