"""Lists of runs, and the names by which commands find them."""

import errno
import math
import os
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from many_runs import make_run, make_sweep, owned

import runner
from runner.errors import InputError
from runner.records import tables
from runner.records.labels import Labels, read_labels, write_labels
from runner.records.listing import (
    ORDERS,
    Entry,
    as_facts,
    describe_age,
    find_record,
    list_entries,
    read_entry,
    select,
)
from runner.records.settings import read_overrides, read_settings
from runner.records.tables import text_table


@pytest.fixture
def outputs(tmp_path: Path) -> Path:
    folder = tmp_path / "outputs"
    make_sweep(folder / "run" / "sweep-20260101-000000", "finished", "failed", "waiting", age_s=300)
    make_run(folder / "run" / "20260101-000000", "optimizer.lr=0.5", age_s=200)
    make_run(folder / "other" / "20260101-000001", "seed=1", state="running", age_s=100)
    return folder


def by_name(entries: list[Entry]) -> dict[str, Entry]:
    return {entry.name: entry for entry in entries}


def test_an_entry_has_the_state_and_the_values_of_the_monitor(outputs: Path) -> None:
    with owned(outputs / "other" / "20260101-000001"):
        entries = by_name(list_entries(outputs))
    assert {name: (entry.state, entry.done) for name, entry in entries.items()} == {
        "run/sweep-20260101-000000": ("failed", "1/3"),
        "run/20260101-000000": ("finished", ""),
        "other/20260101-000001": ("running", ""),
    }
    assert {entry.standing[1:] for entry in entries.values()} == {(0.9, 0.8)}  # of the running run: from metrics.jsonl
    newest = ["other/20260101-000001", "run/20260101-000000", "run/sweep-20260101-000000"]
    assert [entry.name for entry in sorted(entries.values(), key=ORDERS["started"])] == newest
    assert all(entry.size >= 4096 and 50 < time.time() - entry.started < 400 for entry in entries.values())
    jobs = by_name(list_entries(outputs, expands_jobs=True))
    assert len(jobs) == 5 and jobs["run/sweep-20260101-000000/2-lr-0.3"].state == "waiting"
    assert [*by_name(list_entries(outputs / "run" / "sweep-20260101-000000"))] == ["0-lr-0.1", "1-lr-0.2", "2-lr-0.3"]


def test_complete_checkpoints_are_shown_in_their_order(outputs: Path) -> None:
    path = outputs / "run" / "20260101-000000"
    for name in ("step_12", "step_4", "step_16.tmp", "step_x"):
        (path / "checkpoints" / name).mkdir(parents=True)
    assert as_facts(read_entry(path, outputs))["checkpoints"] == "step_4, step_12"
    (path / "checkpoints" / "step_16.tmp").rmdir()


def test_entries_are_sorted_with_the_best_first_and_missing_values_last(tmp_path: Path) -> None:
    for name, value in {"a": 0.5, "b": math.nan, "c": 0.7}.items():
        make_run(tmp_path / name, best={"step": 1, "value": value}, metrics={"val/accuracy": value})
        (tmp_path / name / "metrics.jsonl").unlink()
    entries = sorted(list_entries(tmp_path), key=ORDERS["best"])
    assert [entry.name for entry in entries] == ["c", "a", "b"]


def test_conditions_are_compared_with_the_recorded_configuration(outputs: Path) -> None:
    entries = list_entries(outputs)

    def names(*where: str, tags: tuple[str, ...] = (), states: tuple[str, ...] = (), name: str = "") -> list[str]:
        return sorted(entry.name for entry in select(entries, where, tags, states, name, []))

    assert names("optimizer.lr=0.50") == ["run/20260101-000000"]
    assert names("optimizer.lr=0.2") == ["run/sweep-20260101-000000"]  # a job has it
    assert names("seed=1", "model=mlp") == ["other/20260101-000001"]
    assert names(states=("lost", "failed")) == ["other/20260101-000001", "run/sweep-20260101-000000"]
    assert names(name="run/2026") == names(name="run/2???0101") == ["run/20260101-000000"]
    for arguments, message in {
        ("optimiser.lr=1",): "--where optimiser.lr=1: no run has recorded optimiser.lr; did you mean optimizer.lr?",
        ("seed",): "--where seed: must be KEY=VALUE",
    }.items():
        with pytest.raises(InputError, match=message.replace("?", r"\?")):
            names(*arguments)
    with pytest.raises(InputError, match="--tag paper: no run has this tag"):
        names(tags=("paper",))


def test_a_unique_beginning_of_a_name_finds_a_run(outputs: Path) -> None:
    sweep = outputs / "run" / "sweep-20260101-000000"
    for text, path in {
        "last": outputs / "other" / "20260101-000001",
        "sweep": sweep,
        "run/20": outputs / "run" / "20260101-000000",
        "20260101-000000": outputs / "run" / "20260101-000000",
        "sweep-20260101-000000/1": sweep / "1-lr-0.2",
        str(sweep / "1-lr-0.2"): sweep / "1-lr-0.2",
    }.items():
        assert find_record(text, outputs) == path, text
    with pytest.raises(InputError, match=r"2026 is the beginning of 2 names \(other/2.*, run/2.*\); type more"):
        find_record("2026", outputs)
    for text in ("2027", "run/sweep-2027", "last"):
        with pytest.raises(InputError, match=f"{text} is no run or sweep in"):
            find_record(text, outputs if text != "last" else outputs / "nowhere")


def test_a_damaged_run_is_skipped_with_a_message(outputs: Path) -> None:
    (outputs / "run" / "20260101-000000" / "result.json").write_text("[1]")
    (outputs / "other" / "20260101-000001" / "labels.json").write_text('{"tags": [1], "archived": false}')
    skipped: list[str] = []
    assert [entry.done for entry in list_entries(outputs, skipped=skipped)] == ["1/3"]
    assert ["result.json" in line or "labels.json" in line for line in skipped] == [True, True]


def test_a_damaged_configuration_is_named_and_does_not_match(outputs: Path) -> None:
    for damaged in ("run/20260101-000000", "run/sweep-20260101-000000/1-lr-0.2"):
        (outputs / damaged / "config.yaml").write_text("a: [\n")
    skipped: list[str] = []
    entries = select(list_entries(outputs), ["optimizer.lr=0.1"], (), (), "", skipped)
    assert sorted(entry.name for entry in entries) == ["other/20260101-000001", "run/sweep-20260101-000000"]
    assert sorted(line.split(" is skipped: ")[0] for line in skipped) == [
        f"{outputs}/run/20260101-000000",
        f"{outputs}/run/sweep-20260101-000000/1-lr-0.2",
    ]


def test_unreadable_and_deep_directories_are_named(outputs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """scandir fails by a patch, because root may read every directory."""
    make_run(outputs / "run" / "locked" / "20260101-000002")
    make_run(outputs.joinpath("run", *["d"] * 18, "20260101-000003"))  # at the limit
    deep = outputs.joinpath("run", *["d"] * 19)
    make_run(deep / "20260101-000004")
    scandir = os.scandir

    def scan(path: Any) -> Any:
        if str(path).endswith("locked"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", scan)
    skipped: list[str] = []
    assert len(list_entries(outputs, skipped=skipped)) == 4
    assert sorted(skipped) == [
        f"{deep} is skipped: it has more than 20 parent directories in {outputs}",
        f"{outputs}/run/locked is skipped: Permission denied",
    ]
    with pytest.warns(UserWarning) as warned:
        assert len(runner.runs(outputs)) == 5
    assert sorted(str(each.message) for each in warned) == sorted(skipped)


def test_runs_of_the_name_cells_are_listed(tmp_path: Path) -> None:
    """Unlike the runs of task=compare, which are in the directory `cells` of a run."""
    make_run(tmp_path / "cells" / "20260101-000000")
    make_run(tmp_path / "cells" / "20260101-000000" / "cells" / "ddp-2")
    assert [entry.name for entry in list_entries(tmp_path)] == ["cells/20260101-000000"]


def test_labels_are_checked_and_an_empty_file_is_removed(tmp_path: Path) -> None:
    write_labels(tmp_path, Labels(["a.b", "x"], True))
    assert read_labels(tmp_path) == Labels(["a.b", "x"], True)
    for labels in (Labels(["two words"]), Labels(["two\nlines"]), Labels(["\x1b[31m"])):
        with pytest.raises(InputError):
            write_labels(tmp_path, labels)
    write_labels(tmp_path, Labels())
    assert not (tmp_path / "labels.json").exists() and read_labels(tmp_path) == Labels()


def test_sections_are_read_as_yaml_reads_the_whole_file(tmp_path: Path) -> None:
    """Also if the file is not as the runner writes it."""
    path = tmp_path / "config.yaml"
    value = {
        "a": {"b": [1, {"c": 2}], "text": "x: y\n\nz #"},
        "n": None,
        "e": {},
        "list": ["- a", "b"],
        "s": "k: 'v\n'",
    }
    for text in (yaml.safe_dump(value, sort_keys=False), yaml.dump(value, default_flow_style=True, width=10)):
        path.write_text(text)
        settings = read_settings(path, {"model": "mlp"})
        expected = {"a.b": [1, {"c": 2}], "a.text": "x: y\n\nz #", "n": None, "e": {}, "list": ["- a", "b"]}
        assert dict(settings) == expected | {"s": "k: 'v\n'", "model": "mlp"}
    anchors = "a: &x {b: 1}\nc: *x\n"
    path.write_text(anchors)
    assert dict(read_settings(path, {})) == {"a.b": 1, "c.b": 1}
    path.write_text("a: 1\nb: [\n")
    with pytest.raises(InputError, match="cannot be read"):
        read_settings(path, {})


def test_overrides_are_read_as_yaml_reads_them(tmp_path: Path) -> None:
    path = tmp_path / "overrides.yaml"
    for words in (
        ["a=1", "b.c=x-1,2"],
        ["a=1", "note='two words: #'"],
        ["--config-dir=/x y"],
        ["+a=[1,2]"],
        ["a=" + "b " * 99],
    ):
        path.write_text(yaml.safe_dump(words))
        assert read_overrides(path) == words
    path.write_text("- a=1\n- 2\n")
    with pytest.raises(InputError, match="list of strings"):
        read_overrides(path)
    assert read_overrides(tmp_path / "missing.yaml") == []


def test_ages_are_short() -> None:
    assert [describe_age(each) for each in (-5, 59, 61, 7200, 200_000)] == ["0 s", "59 s", "1 min", "2 h", "2 d"]


def test_an_entry_of_a_sweep_without_jobs_that_started(tmp_path: Path) -> None:
    entry = read_entry(make_sweep(tmp_path / "sweep", "waiting"), tmp_path)
    assert (entry.state, entry.done, entry.standing.monitor) == ("waiting", "0/1", None) and math.isnan(
        entry.standing.best
    )


def test_a_table_of_many_rows_is_as_one_of_few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    cells = [["name", "number", ""], ["a", "1.5", "x"], ["long name", "-10", ""]]
    folded = text_table(cells)
    monkeypatch.setattr(tables, "MAX_FOLDED", 1)
    assert text_table(cells) == folded == "name       number\na             1.5  x\nlong name     -10"


def test_equal_sections_of_many_runs_are_parsed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise YAML dominates the time of a table of thousands of runs (benchmarks/listing.py)."""
    for number in range(20):
        make_run(tmp_path / f"{number}", *(["optimizer.lr=0.2", "seed=11"] if number else []))
    loaded = []
    load = yaml.load
    monkeypatch.setattr(yaml, "load", lambda text, **options: loaded.append(text) or load(text, **options))
    table = runner.table(runner.runs(tmp_path))
    assert set(table["optimizer.lr"]) == {0.1, 0.2} and set(table["seed"]) == {0, 11}
    assert len([text for text in loaded if isinstance(text, str)]) <= 5  # overrides.yaml is read as bytes
