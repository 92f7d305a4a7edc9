"""Numbers that are not finite: null in every file, NaN to who reads it, and the best of nothing."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from worlds import run

import runner
from runner.runs.loggers.history import logged
from runner.runs.records import read_jobs
from runner.runs.report.render import best
from runner.runs.report.statistics import summarize
from runner.runs.run_directory import RunDirectory, read_result
from runner.runs.strict_json import dumps, numbers
from runner.runs.train_state import available

NAN = math.nan


def strictly(text: str) -> Any:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    return json.loads(text, parse_constant=refuse)


def test_what_is_not_finite_is_null_and_nan_again() -> None:
    value = {"a": [NAN, math.inf, 1.5, (2, -math.inf)], "b": {"c": NAN}, "d": "NaN"}
    assert strictly(dumps(value)) == {"a": [None, None, 1.5, [2, None]], "b": {"c": None}, "d": "NaN"}
    assert dumps({"a": 1.5}, indent=1) == json.dumps({"a": 1.5}, indent=1)
    read = numbers({"x": None, "y": 2, "z": "text"})
    assert math.isnan(read.pop("x")) and read == {"y": 2}
    assert numbers(None) == {}


def test_a_run_that_diverges_leaves_json_and_is_best_of_nothing(tmp_path: Path) -> None:
    words = ("data=random", "model=linear", "on_nonfinite=go_on", "logger=csv", "max_steps=40", "eval_every_steps=20")
    lost = run(tmp_path / "lost", 1, *words, "optimizer.lr=1e12")
    sound = run(tmp_path / "sound", 1, *words, "optimizer.lr=1e-3")
    for path in (*lost.path.glob("*.json"), *lost.path.glob("checkpoints/*/*.json")):
        strictly(path.read_text())
    for path in lost.path.glob("*.jsonl"):
        lines = [strictly(line) for line in path.read_text().splitlines()]
    assert strictly((lost.path / "result.json").read_text())["metrics"]["val/loss"] is None
    assert lost.result["best"] is None and not (lost.path / "checkpoints" / "best").exists()
    assert available(lost.path / "checkpoints")

    assert math.isnan((read_result(lost.path) or {})["metrics"]["val/loss"])
    assert math.isnan(runner.open_run(lost.path).metrics["val/loss"][-1])
    assert math.isnan(dict(logged(str(lost.path)))[40]["val/loss"])
    assert all(map(math.isnan, RunDirectory(lost.path).evaluations("val/loss").values()))
    jobs = [job for left in (lost, sound) for job in read_jobs(left.path, "run")]
    assert math.isnan(jobs[0].metrics["val/loss"])
    for direction in ("max", "min"):
        assert str(sound.path) in str((summarize(jobs, "val/loss", direction).best or summarize([])).jobs)
        assert best(summarize(jobs[:1], "val/loss", direction)) == []
    lines = lost.lines
    again = run(tmp_path / "lost", 1, f"resume={lost.path}", "max_steps=50")
    assert len(again.lines) > len(lines)


@pytest.mark.parametrize("text", ["NaN", "Infinity", "null"])
def test_a_file_of_an_older_version_is_read(text: str, tmp_path: Path) -> None:
    (tmp_path / "result.json").write_text(f'{{"state": "finished", "metrics": {{"val/loss": {text}}}}}')
    (tmp_path / "metrics.jsonl").write_text(f'{{"step": 3, "epoch": 1, "val/loss": {text}}}\n')
    (tmp_path / "overrides.yaml").write_text("[]")
    (job,) = read_jobs(tmp_path, "run")
    assert not math.isfinite(job.metrics["val/loss"]) and job.curve("val/loss") == []
    assert summarize([job]).best is None
    assert not math.isfinite(RunDirectory(tmp_path).evaluations("val/loss")[3])
