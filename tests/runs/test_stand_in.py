"""What is told of a failure in rank 0's place, where it cannot all be told."""

import json
import sys
from pathlib import Path

import pytest

from runner.runs.stand_in import tell_failure


class Gone:
    """A terminal that has gone."""

    def write(self, text: str) -> int:
        raise OSError(5, "Input/output error")

    def flush(self) -> None:
        raise OSError(5, "Input/output error")


@pytest.mark.parametrize("log", ["gone", "full"])
def test_a_failure_is_recorded_where_the_terminal_or_the_log_takes_nothing(
    log: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "result.json").write_text(json.dumps({"state": "running", "metrics": {}}))
    if log == "full":
        (tmp_path / "log.txt").symlink_to("/dev/full")
    monkeypatch.setattr(sys, "stderr", Gone())
    tell_failure(tmp_path, "no word from rank 0")
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["state"], result["error"]) == ("failed", "no word from rank 0")
    (tmp_path / "result.json.tmp").mkdir()  # nothing can be written
    (tmp_path / "result.json").write_text(json.dumps({"state": "running", "metrics": {}}))
    tell_failure(tmp_path, "no word from rank 0")
