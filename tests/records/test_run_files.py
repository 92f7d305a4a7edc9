"""Record files: non-finite numbers are null in each file and NaN for each reader, and are never the best value."""

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
from many_runs import make_run
from worlds import run

import runner
from runner.checkpoints.layout import list_checkpoints
from runner.errors import InputError
from runner.records import run_files
from runner.records.compared_runs import read_jobs
from runner.records.listing import list_entries
from runner.records.loggers.dashboard import logged_metrics
from runner.records.report.render import best
from runner.records.report.statistics import summarize
from runner.records.run_directory import RunDirectory
from runner.records.run_files import (
    METRICS,
    append_json_lines,
    dumps,
    parse_json,
    parse_metrics,
    read_json_lines,
    read_metrics,
    read_string_list,
)
from runner.records.run_record import find_run

NAN = math.nan


def parse_strictly(text: str) -> Any:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


def test_non_finite_numbers_are_written_as_null_and_read_as_nan() -> None:
    value = {"a": [NAN, math.inf, 1.5, (2, -math.inf)], "b": {"c": NAN}, "d": "NaN"}
    assert parse_strictly(dumps(value)) == {"a": [None, None, 1.5, [2, None]], "b": {"c": None}, "d": "NaN"}
    assert dumps({"a": 1.5}, indent=1) == json.dumps({"a": 1.5}, indent=1)
    metrics = parse_metrics({"x": None, "y": 2, "z": "text"})
    assert math.isnan(metrics.pop("x")) and metrics == {"y": 2}
    assert parse_metrics(None) == {}


def test_integers_that_no_float_can_represent_are_left_out(tmp_path: Path) -> None:
    huge = 10**400
    make_run(tmp_path / "run", seconds=huge, metrics={"val/accuracy": 0.5, "x": huge}, best={"step": 1, "value": huge})
    (tmp_path / "run" / "metrics.jsonl").write_text(json.dumps({"step": 1, "val/accuracy": huge, "y": -huge}) + "\n")
    (entry,) = list_entries(tmp_path)
    assert entry.standing[1:] == (0.5, 0.5)
    assert set(runner.table(runner.runs(tmp_path))) == {"path", "state", "val/accuracy"}
    assert set(runner.open_run(tmp_path / "run").metrics) == {"step", "epoch"}
    (tmp_path / "run" / "metrics.jsonl").write_text(json.dumps({"step": huge}) + "\n")
    with pytest.raises(InputError, match="has no step"):
        _ = runner.open_run(tmp_path / "run").metrics


def test_the_size_of_each_value_is_bounded() -> None:
    """Also of those whose text has few brackets."""
    for text in ("[" * 60 + "]" * 60, "[" + "1," * 1_000_000 + "1]", b"[" * 60 + b"]" * 60):
        with pytest.raises(ValueError, match="levels of nesting"):
            parse_json(text)
    assert parse_json(b'{"a": [1, "[[[["]}') == {"a": [1, "[[[["]}


@pytest.mark.parametrize(("text", "problem"), [("a: 1", "must contain a list"), ("[", "cannot")])
def test_other_content_than_a_list_of_strings_is_refused(text: str, problem: str, tmp_path: Path) -> None:
    path = tmp_path / "overrides.yaml"
    path.write_text(text)
    with pytest.raises(InputError, match=f"overrides.yaml {problem}"):
        read_string_list(path)


def test_a_diverged_run_writes_json_and_is_never_the_best(tmp_path: Path) -> None:
    words = ("data=random", "model=linear", "on_nonfinite=go_on", "logger=csv", "max_steps=40", "eval_every_steps=20")
    diverged = run(tmp_path / "diverged", 1, *words, "optimizer.lr=1e12")
    sound = run(tmp_path / "sound", 1, *words, "optimizer.lr=1e-3")
    for path in (*diverged.path.glob("*.json"), *diverged.path.glob("checkpoints/*/*.json")):
        parse_strictly(path.read_text())
    for path in diverged.path.glob("*.jsonl"):
        for line in path.read_text().splitlines():
            parse_strictly(line)
    assert parse_strictly((diverged.path / "result.json").read_text())["metrics"]["val/loss"] is None
    assert diverged.result["best"] is None and not (diverged.path / "checkpoints" / "best").exists()
    assert list_checkpoints(diverged.path / "checkpoints")

    assert math.isnan(find_run(diverged.path).metrics["val/loss"])
    assert math.isnan(runner.open_run(diverged.path).metrics["val/loss"][-1])
    assert math.isnan(dict(logged_metrics(str(diverged.path)))[40]["val/loss"])
    assert all(map(math.isnan, RunDirectory(diverged.path).evaluations("val/loss").values()))
    jobs = [job for made in (diverged, sound) for job in read_jobs(made.path, "run")]
    assert math.isnan(jobs[0].metrics["val/loss"]) and jobs[0].curves("val/loss") == {"val/loss": {}}
    for direction in ("max", "min"):
        assert str(sound.path) in str((summarize(jobs, "val/loss", direction).best or summarize([])).jobs)
        assert best(summarize(jobs[:1], "val/loss", direction)) == []
    num_lines = len(diverged.lines)
    assert len(run(tmp_path / "diverged", 1, f"resume={diverged.path}", "max_steps=50").lines) > num_lines


def test_only_complete_lines_of_metrics_count(tmp_path: Path) -> None:
    whole = [f'{{"step": {step}, "epoch": 1}}' for step in range(60)]
    for damaged in (f"{whole[0]}, {whole[1]}", whole[0][:-1], "", "7"):
        (tmp_path / METRICS).write_text("\n".join([*whole, damaged, *([whole[2]] if damaged != "7" else [])]) + "\n")
        if damaged == "7":
            with pytest.raises(InputError, match="line 61: 7 is not a JSON object"):
                list(read_metrics(tmp_path))
        else:
            assert [line["step"] for line in read_metrics(tmp_path)] == [*range(60), 2]


@pytest.mark.fault("short writes", outcome="survived")
def test_all_lines_are_written_although_the_system_writes_seven_bytes_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, lines = os.write, [{"number": number, "text": "ä" * number} for number in range(20)]
    monkeypatch.setattr(run_files.os, "write", lambda file, data: write(file, data[:7]))
    append_json_lines(tmp_path / "ledger.jsonl", *lines[:10])
    append_json_lines(tmp_path / "ledger.jsonl", *lines[10:])
    assert list(read_json_lines(tmp_path / "ledger.jsonl")) == lines
    monkeypatch.setattr(run_files.os, "write", lambda file, data: 0)
    with pytest.raises(OSError, match=r"Input/output error: .*ledger\.jsonl"):
        append_json_lines(tmp_path / "ledger.jsonl", lines[0])
