"""The monitored metric: in records, and for the comparison of jobs that have different ones."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from runner.records.monitor import BY_LOSS, Monitor, recorded_monitor
from runner.records.report.render import as_markdown, as_text
from runner.records.report.statistics import monitors_of, summarize
from runner.records.run_directory import RunDirectory
from runner.records.run_record import RunRecord

F1, MAE = Monitor("val/f1", "max"), Monitor("val/mae", "min")


@pytest.mark.parametrize(
    ("recorded", "metrics", "expected"),
    [
        ({"name": "val/f1", "direction": "max"}, ["val/f1", "val/loss"], F1),
        ({"name": "val/f1/macro", "direction": "max"}, ["test/f1/macro"], Monitor("test/f1/macro", "max")),
        ({"name": "val/f1", "direction": "max"}, ["val/loss"], None),  # the run ended before its first evaluation
        ("nonsense", ["val/loss"], None),
    ],
)
def test_the_monitor_of_a_record(recorded: Any, metrics: list[str], expected: Monitor | None) -> None:
    assert recorded_monitor(recorded, metrics) == expected


def job(name: str, monitor: Monitor | None, state: str = "finished", **metrics: float) -> RunRecord:
    measured = {f"val/{key}": value for key, value in metrics.items()}
    recorded = asdict(monitor) if monitor else None
    return RunRecord(Path(name), state, metrics=measured, monitor=recorded, planned=(f"metrics={name}",))


def test_jobs_are_compared_by_the_metric_that_all_have_measured() -> None:
    jobs = [job("a", F1, f1=0.5, loss=1.0), job("b", F1, f1=0.7, loss=2.0), job("c", MAE, f1=0.6, mae=0.1, loss=3.0)]
    assert monitors_of(jobs) == [F1, BY_LOSS, MAE]
    summary = summarize(jobs)
    assert (summary.metric, summary.descending) == ("val/f1", True)
    assert [row.name for row in summary.rows] == ["metrics=b", "metrics=c", "metrics=a"]
    text = as_text(summary)
    assert text.splitlines()[0].split() == ["metrics", "val/f1", "val/loss", "val/mae", "n"]
    assert "best metrics=b: val/f1 0.7000" in text
    assert "Sorted by val/f1, largest first" in as_markdown(summary, "title", [])


def test_jobs_with_different_monitors_are_compared_by_the_loss() -> None:
    jobs = [job("a", F1, f1=0.5, loss=2.0), job("b", MAE, mae=0.5, loss=1.0), job("c", None, "failed")]
    assert monitors_of(jobs) == [BY_LOSS, F1, MAE]
    summary = summarize(jobs)
    assert (summary.metric, summary.descending, summary.best and summary.best.name) == ("val/loss", False, "metrics=b")
    without_loss = [job("a", F1, f1=0.5), job("b", MAE, mae=0.5), job("d", MAE, mae=0.6)]
    assert monitors_of(without_loss) == [MAE, F1, BY_LOSS]
    assert monitors_of([job("a", None, rate=3.0)]) == []


def test_a_requested_metric_takes_precedence_and_has_its_own_direction() -> None:
    jobs = [job("a", F1, f1=0.5, mae=2.0), job("b", MAE, f1=0.6, mae=1.0)]
    assert not summarize(jobs, "val/mae").descending and summarize(jobs, "val/f1").descending
    assert summarize(jobs, "val/mae", "max").descending
    upside_down = [job("a", Monitor("val/mae", "max"), mae=1.0)]
    assert summarize(upside_down).descending and summarize(upside_down, "val/mae").descending


def test_evaluations_are_the_lines_with_the_validation_loss(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    assert directory.evaluations("val/f1/macro") == {}
    directory.log_metrics(3, 1, {"val/loss": 0.1, "val/f1/macro": 0.5})
    directory.log_metrics(3, 1, {"val/mine": 1.0})  # of a callback, not of an evaluation
    directory.log_metrics(5, 1, {"val/mine": 1.0})
    directory.log_metrics(4, 1, {"train/loss": 0.5})
    assert directory.evaluations("val/f1/macro") == {3: 0.5}
    assert [str(value) for value in directory.evaluations("val/mae").values()] == ["nan"]
