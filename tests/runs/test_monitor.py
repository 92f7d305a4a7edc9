"""The metric that runs are compared by: in older records too, and over jobs that have different ones."""

from pathlib import Path
from typing import Any

import pytest

from runner.runs.ledger import JobRecord
from runner.runs.monitor import BY_LOSS, Monitor, evaluated, recorded_monitor, shown
from runner.runs.records import RunRecord
from runner.runs.report.render import as_markdown, as_text
from runner.runs.report.statistics import monitors_of, summarize
from runner.runs.run_directory import RunDirectory
from runner.sweeps.summary import table

F1, MAE = Monitor("val/f1", "max"), Monitor("val/mae", "min")
BY_ACCURACY = Monitor("val/accuracy", "max")


@pytest.mark.parametrize(
    ("kept", "metrics", "expected"),
    [
        ({"name": "val/f1", "direction": "max"}, ["val/f1", "val/loss"], F1),
        ({"name": "val/f1", "direction": "min"}, ["val/f1"], Monitor("val/f1", "min")),
        ({"name": "val/f1", "direction": "max"}, ["test/f1", "test/loss"], Monitor("test/f1", "max")),
        ({"name": "val/f1/macro", "direction": "max"}, ["test/f1/macro"], Monitor("test/f1/macro", "max")),
        ({"name": "val/f1", "direction": "max"}, ["val/loss"], None),  # it had ended before
        (None, ["val/accuracy", "val/loss"], BY_ACCURACY),  # as an older version compared
        (None, ["train/loss", "val/loss"], BY_LOSS),
        (None, ["ddp/2"], None),
        ("nonsense", ["val/loss"], BY_LOSS),
    ],
)
def test_a_record_says_its_monitor(kept: Any, metrics: list[str], expected: Monitor | None) -> None:
    assert recorded_monitor({"monitor": kept}, metrics) == expected


def test_a_line_shows_what_is_monitored_and_the_loss() -> None:
    assert shown([F1], ["val/loss", "val/f1", "val/mae"]) == ["val/f1", "val/loss"]
    assert shown([BY_LOSS], ["train/loss", "val/loss"]) == ["val/loss"]
    assert evaluated(["train/loss", "val/loss", "val/f1/macro", "test/f1", "seconds"]) == ["val/loss", "test/f1"]


def job(name: str, monitor: Monitor | None, state: str = "finished", **metrics: float) -> RunRecord:
    measured = {f"val/{key}": value for key, value in metrics.items()}
    return RunRecord(Path(name), name, state, [f"metrics={name}"], metrics=measured, monitor=monitor)


def test_jobs_are_compared_by_the_monitor_that_all_have() -> None:
    jobs = [job("a", F1, f1=0.5, loss=1.0), job("b", F1, f1=0.7, loss=2.0), job("c", MAE, f1=0.6, mae=0.1, loss=3.0)]
    assert monitors_of(jobs) == [F1, MAE]
    summary = summarize(jobs)
    assert (summary.metric, summary.descending) == ("val/f1", True)
    assert [row.name for row in summary.rows] == ["metrics=b", "metrics=c", "metrics=a"]
    text = as_text(summary)
    assert text.splitlines()[0].split() == ["metrics", "val/f1", "val/loss", "val/mae", "n"]
    assert "best metrics=b: val/f1 0.7000" in text
    assert "Sorted by val/f1, the largest first" in as_markdown(summary, "title", [])


def test_jobs_whose_monitors_differ_are_compared_by_the_loss() -> None:
    jobs = [job("a", F1, f1=0.5, loss=2.0), job("b", MAE, mae=0.5, loss=1.0), job("c", None, "failed")]
    assert monitors_of(jobs) == [BY_LOSS, F1, MAE]
    summary = summarize(jobs)
    assert (summary.metric, summary.descending, summary.best and summary.best.name) == ("val/loss", False, "metrics=b")
    without_loss = [job("a", F1, f1=0.5), job("b", MAE, mae=0.5), job("d", MAE, mae=0.6)]
    assert monitors_of(without_loss) == [MAE, F1]
    assert monitors_of([job("a", None, rate=3.0)]) == []


def test_the_typed_metric_wins_and_has_its_own_direction() -> None:
    jobs = [job("a", F1, f1=0.5, mae=2.0), job("b", MAE, f1=0.6, mae=1.0)]
    assert not summarize(jobs, "val/mae").descending and summarize(jobs, "val/f1").descending
    assert summarize(jobs, "val/mae", "max").descending
    upside_down = [job("a", Monitor("val/mae", "max"), mae=1.0)]
    assert summarize(upside_down).descending and summarize(upside_down, "val/mae").descending


def test_older_and_newer_records_are_in_one_report() -> None:
    older = recorded_monitor({}, ["val/accuracy", "val/loss"])
    jobs = [job("a", older, accuracy=0.5, loss=1.0), job("b", BY_ACCURACY, accuracy=0.7, loss=2.0)]
    assert monitors_of(jobs) == [BY_ACCURACY]


def test_the_table_of_a_sweep_has_the_metrics_that_are_asked_for(tmp_path: Path) -> None:
    jobs = [JobRecord(0, "0-a", [], tmp_path, state="finished", metrics={"val/f1": 0.5, "val/loss": 1.0})]
    header, line = table(jobs, ["val/f1", "val/mae", "val/loss"]).splitlines()
    assert header.split() == ["job", "state", "val/f1", "val/mae", "val/loss", "why"]
    assert line.split() == ["0-a", "finished", "0.5000", "1.0000"]


def test_an_evaluation_is_a_line_with_the_loss_of_the_validation_data(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    assert directory.evaluations("val/f1/macro") == {}
    directory.log_metrics(3, 1, {"val/loss": 0.1, "val/f1/macro": 0.5})
    directory.log_metrics(3, 1, {"val/mine": 1.0})  # a callback's own, of no evaluation
    directory.log_metrics(5, 1, {"val/mine": 1.0})
    directory.log_metrics(4, 1, {"train/loss": 0.5})
    assert directory.evaluations("val/f1/macro") == {3: 0.5}
    assert [str(value) for value in directory.evaluations("val/mae").values()] == ["nan"]
