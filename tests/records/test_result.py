"""A failure that another rank reports on behalf of rank 0."""

import json
import sys
from pathlib import Path

import pytest

from runner.records.result import report_failure


class ClosedTerminal:
    def write(self, text: str) -> int:
        raise OSError(5, "Input/output error")

    def flush(self) -> None:
        raise OSError(5, "Input/output error")


@pytest.mark.parametrize("is_disk_full", [False, True])
def test_a_failure_is_recorded_without_a_terminal_and_on_a_full_disk(
    is_disk_full: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "result.json").write_text(json.dumps({"state": "running", "metrics": {}}))
    if is_disk_full:
        (tmp_path / "log.txt").symlink_to("/dev/full")
    monkeypatch.setattr(sys, "stderr", ClosedTerminal())
    report_failure(tmp_path, "rank 0 has died")
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["state"], result["error"]) == ("failed", "rank 0 has died")
    (tmp_path / "result.json.tmp").mkdir()  # result.json cannot be written
    (tmp_path / "result.json").write_text(json.dumps({"state": "running", "metrics": {}}))
    report_failure(tmp_path, "rank 0 has died")
