"""The order of runs and sweeps by the time at which they were started."""

import json
import os
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
from many_runs import SMALL, make_run, make_sweep

import runner
from runner.records.finding import newest_record
from runner.records.start_time import in_order, started_at


@pytest.fixture
def zone(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    def set_zone(name: str) -> None:
        monkeypatch.setenv("TZ", name)
        time.tzset()

    yield set_zone
    monkeypatch.undo()
    time.tzset()


@pytest.mark.thorough
def test_last_is_the_newest_in_all_time_zones_and_names(
    here: Callable[..., int], zone: Callable[[str], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A sweep and a run on a machine in Tokyo, then others on a machine in New York, whose clock shows less."""
    for name in ("Asia/Tokyo", "America/New_York"):
        zone(name)
        assert here("-m", *SMALL, "max_steps=1", "seed=0,1") == 0
        assert here(*SMALL, "max_steps=1") == 0
    folder = tmp_path / "outputs" / "run"
    first, second = sorted(folder.glob("sweep-*"), key=lambda path: path.stat().st_mtime)
    assert first.name > second.name
    times = [run.result["started"] for run in runner.runs(first)]
    assert times[0] < times[1]  # of the jobs, in milliseconds
    assert here("-m", "resume=last", "seed=0,1,2") == 0
    assert f"resuming {second}: 2 jobs are done" in capsys.readouterr().out
    listed = [run.path for run in runner.runs() if run.path.parent == folder]
    assert listed[0].name > listed[1].name and runner.open_run("last").path == listed[1]
    assert here(*SMALL, "max_steps=1", "name=other") == 0
    assert here("resume=last", "max_steps=2") == 0 and runner.Run(listed[1]).result["step"] == 2
    assert here("resume=last", "name=*", "max_steps=3") == 0
    (other,) = (tmp_path / "outputs" / "other").iterdir()
    assert runner.Run(other).result["step"] == 3
    assert here("-m", "resume=last", "name=*", "seed=3") == 0
    assert len(list(second.glob("[0-9]*"))) == 4
    assert not (tmp_path / "outputs" / "*").exists()
    assert here("resume=last", "name=*", "outputs=nowhere") == 2
    assert "resume=last: there is no run under" in capsys.readouterr().err


def test_the_first_start_counts_and_is_kept_by_a_resume(here: Callable[..., int], tmp_path: Path) -> None:
    for _ in range(2):
        assert here(*SMALL, "max_steps=1") == 0
    first, second = runner.runs()
    started = datetime.fromisoformat(first.result["started"])
    assert started.tzinfo == UTC and abs(started.timestamp() - time.time()) < 300
    assert here(f"resume={first.path}", "max_steps=2") == 0
    assert first.result["started"] == started.isoformat(timespec="milliseconds")
    assert [run.path for run in runner.runs()] == [first.path, second.path]


def test_directories_of_earlier_versions_are_ordered_by_what_they_have_recorded(tmp_path: Path) -> None:
    paths = [make_run(tmp_path / name, started=None) for name in ("a", "20260101-000000", "b-20260102-000000-1")]
    (paths[0] / "attempts.jsonl").write_text(json.dumps({"number": 1, "started": "2026-01-03T23:00:00+00:00"}) + "\n")
    sweep = make_sweep(tmp_path / "sweep-20260102-000001", "finished", age_s=time.time() - 1_000_000)
    assert in_order([*paths, sweep]) == [sweep, paths[1], paths[2], paths[0]]
    assert newest_record([tmp_path]) == paths[0]
    assert started_at(sweep) == pytest.approx(1_000_000)
    assert started_at(tmp_path / "new") is None
    hand_made = make_run(tmp_path / "x", started="yesterday")
    os.utime(hand_made / "overrides.yaml", (5, 5))
    assert started_at(hand_made) == 5.0
