"""The monitored metric: in records, and for the comparison of jobs that have different ones."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from runner.errors import InputError
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
    assert (summary.metric, summary.direction) == ("val/f1", "max")
    assert [row.name for row in summary.rows] == ["metrics=b", "metrics=c", "metrics=a"]
    text = as_text(summary)
    assert text.splitlines()[0].split() == ["metrics", "val/f1", "val/loss", "val/mae", "n"]
    assert "best metrics=b: val/f1 0.7000" in text
    assert "Sorted by val/f1, largest first" in as_markdown(summary, "title", [])


def test_jobs_with_different_monitors_are_compared_by_the_loss() -> None:
    jobs = [job("a", F1, f1=0.5, loss=2.0), job("b", MAE, mae=0.5, loss=1.0), job("c", None, "failed")]
    assert monitors_of(jobs) == [BY_LOSS, F1, MAE]
    summary = summarize(jobs)
    assert (summary.metric, summary.direction, summary.best and summary.best.name) == ("val/loss", "min", "metrics=b")
    without_loss = [job("a", F1, f1=0.5), job("b", MAE, mae=0.5), job("d", MAE, mae=0.6)]
    assert monitors_of(without_loss) == [MAE, F1, BY_LOSS]
    assert monitors_of([job("a", None, rate=3.0)]) == []


def test_a_requested_metric_takes_precedence_and_has_its_own_direction() -> None:
    jobs = [job("a", F1, f1=0.5, mae=2.0), job("b", MAE, f1=0.6, mae=1.0)]
    assert (summarize(jobs, "val/mae").direction, summarize(jobs, "val/f1").direction) == ("min", "max")
    assert summarize(jobs, "val/mae", "max").direction == "max"
    upside_down = [job("a", Monitor("val/mae", "max"), mae=1.0)]
    assert summarize(upside_down).direction == summarize(upside_down, "val/mae").direction == "max"


def test_a_metric_that_is_not_monitored_has_the_direction_that_it_declares() -> None:
    """In each split and for each of its values. Its name has no meaning."""
    jobs = [job(name, F1, f1=0.5, **{"error_free/a": 0.1 * number}) for number, name in enumerate("ab")]
    with pytest.raises(InputError, match=r"report.metric=val/error_free/a: cannot infer .* set report.direction=max"):
        summarize(jobs, "val/error_free/a")
    for each in jobs:
        each.directions = {"error_free": "max", "f1": "nonsense"}
        assert [each.direction_of(f"{split}/error_free/a") for split in ("train", "test")] == ["max", "max"]
        assert each.direction_of("val/f1") is None and each.direction_of("seconds") == "min"
    summary = summarize(jobs, "val/error_free/a")
    assert (summary.direction, summary.best and summary.best.name) == ("max", "metrics=b")


def test_jobs_whose_metrics_have_no_direction_are_not_sorted() -> None:
    jobs = [job(name, None, rate=rate) for name, rate in (("a", 2.0), ("b", 3.0), ("c", 1.0))]
    summary = summarize(jobs)
    assert (summary.metric, summary.direction, summary.best) == ("val/rate", None, None)
    assert [row.name for row in summary.rows] == ["metrics=a", "metrics=b", "metrics=c"]
    assert "best" not in as_text(summary) and "Sorted" not in as_markdown(summary, "title", [])


def test_evaluations_are_the_lines_with_the_validation_loss(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    assert directory.evaluations("val/f1/macro") == {}
    directory.log_metrics(3, 1, {"val/loss": 0.1, "val/f1/macro": 0.5})
    directory.log_metrics(3, 1, {"val/mine": 1.0})  # of a callback, not of an evaluation
    directory.log_metrics(5, 1, {"val/mine": 1.0})
    directory.log_metrics(4, 1, {"train/loss": 0.5})
    assert directory.evaluations("val/f1/macro") == {3: 0.5}
    assert [str(value) for value in directory.evaluations("val/mae").values()] == ["nan"]
