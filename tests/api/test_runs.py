"""Tests of runs on disk, read as data."""

import json
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import yaml

import runner


def write(path: Path, words: list[str], metrics: dict[str, float], lines: Sequence[dict[str, float]] = ()) -> Path:
    path.mkdir(parents=True)
    result = {
        "state": "finished",
        "task": "train",
        "metrics": metrics,
        "monitor": {"name": "val/f1", "direction": "max"},
    }
    (path / "result.json").write_text(json.dumps(result))
    (path / "overrides.yaml").write_text(yaml.safe_dump(words))
    settings = dict(word.split("=") for word in words)
    nested = {"optimizer": {"lr": float(settings["optimizer.lr"])}, "name": settings.get("name", "run")}
    (path / "config.yaml").write_text(yaml.safe_dump(nested))
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 3, "cut')
    return path


def test_metrics_are_columns_with_a_row_per_step(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    lines = [
        {"step": 1, "epoch": 1, "train/loss": 3.0},
        {"step": 2, "epoch": 1, "train/loss": 2.0},
        {"step": 2, "epoch": 1, "val/f1": 0.5, "val/loss": math.nan},
        {"step": 1, "epoch": 1, "train/loss": 4.0},  # repeated after a crash
    ]
    run = runner.open_run(write(tmp_path / "a", ["optimizer.lr=0.1"], {"val/f1": 0.5}, lines))
    columns = run.metrics
    assert [*columns] == ["step", "epoch", "train/loss", "val/f1", "val/loss"]
    assert columns["step"].tolist() == [1, 2] and columns["step"].dtype == np.int64
    assert columns["train/loss"].tolist() == [4.0, 2.0]
    assert np.isnan(columns["val/f1"][0]) and columns["val/f1"][1] == 0.5
    assert run.frame().equals(pandas.DataFrame(columns))
    assert (run.config["optimizer"], run.state) == ({"lr": 0.1}, "finished")
    assert run.monitor is not None and (run.monitor.name, run.monitor.direction) == ("val/f1", "max")


def test_runs_are_listed_in_order_of_start_and_compared_in_a_table(tmp_path: Path) -> None:
    outputs = tmp_path / "outputs"
    places = {
        "run/20260102-000000-1": 0.4,
        "run/sweep-20260102-000001/10-lr-0.3": 0.3,
        "run/sweep-20260102-000001/9-lr-0.2": 0.2,
        "other/20260101-235959": 0.1,
        "run/20260102-000000": 0.5,
    }
    for place, lr in places.items():
        write(outputs / place, [f"optimizer.lr={lr}", "name=x"], {"val/f1": lr} if lr < 0.5 else {})
    listed = runner.runs(outputs)
    table = runner.table(listed)
    assert table["optimizer.lr"].tolist() == [0.1, 0.5, 0.4, 0.2, 0.3]
    assert table["path"].tolist() == [str(run.path) for run in listed]
    assert [*table] == ["path", "state", "optimizer.lr", "val/f1"]
    assert np.isnan(table["val/f1"][1]) and table["val/f1"][0] == 0.1
    assert [run.path.name for run in runner.runs(outputs / "run" / "sweep-20260102-000001")] == [
        "9-lr-0.2",
        "10-lr-0.3",
    ]


def test_missing_numbers_are_nan_in_the_table(tmp_path: Path) -> None:
    paths = [write(tmp_path / name, ["optimizer.lr=0.1"], {}) for name in ("a", "b")]
    (paths[0] / "overrides.yaml").write_text(yaml.safe_dump(["optimizer.lr=0.1", "model.dropout=0.5"]))
    (paths[1] / "result.json").write_text('{"state": "finished", "world_size": 2}')
    table = runner.table([runner.open_run(path) for path in paths])
    assert table["model.dropout"][0] == 0.5 and np.isnan(table["model.dropout"][1])
    assert table["world_size"].tolist() == [1, 2]


def test_paths_without_a_run_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for path, text in {"nowhere": "nowhere is no run directory", "last": "there is no training run"}.items():
        with pytest.raises(runner.InputError, match=text):
            runner.open_run(path)
    with pytest.raises(runner.InputError, match="outputs is no directory"):
        runner.runs()
    run = runner.open_run(write(tmp_path / "a", ["optimizer.lr=1"], {}))
    with pytest.raises(runner.InputError, match=r"checkpoint=last: .* has no checkpoint yet"):
        run.model()
