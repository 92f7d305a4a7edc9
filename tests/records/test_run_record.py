"""The record of a run: its documentation, and what commands show of it."""

import json
import re
from dataclasses import fields
from pathlib import Path

import pytest
from many_runs import make_run
from pages import Page

from runner.records.attempts import Attempt
from runner.records.interruptions import Interruption
from runner.records.listing import as_facts, as_json, read_entry
from runner.records.run_record import RESULT_KEYS, RunRecord, find_run, read_run


def documented(section: str) -> set[str]:
    """Return the names in the first column of the table of a section of docs/run_reference.md."""
    text = Page("run_reference.md").text.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    rows = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    return {name for row in rows for name in re.findall(r"`(\w+)`", row)}


@pytest.mark.parametrize(
    ("section", "names"),
    [
        ("Fields of result.json", RESULT_KEYS),
        ("Attempts", tuple(field.name for field in fields(Attempt))),
        ("Interruptions", tuple(field.name for field in fields(Interruption))),
    ],
)
def test_every_field_has_a_row_in_the_reference(section: str, names: tuple[str, ...]) -> None:
    assert documented(section) == {*names}


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    record = RunRecord(tmp_path, "finished", model="mlp", hosts=["a", "b"], metrics={"val/loss": 0.5}, error="no")
    record.save()
    assert {*json.loads((tmp_path / "result.json").read_text())} == {*RESULT_KEYS}
    assert read_run(tmp_path).as_result() == record.as_result()
    assert not find_run(tmp_path / "missing").is_recorded and find_run(tmp_path / "missing").as_result() == {}


def test_recorded_fields_are_shown(tmp_path: Path) -> None:
    make_run(tmp_path / "run", hosts=["node1", "node2"], seed=3)
    entry = read_entry(tmp_path / "run", tmp_path)
    facts = as_facts(entry)
    assert (facts["hosts"], facts["model"], facts["state"]) == ("node1 node2", "mlp", "finished")
    assert facts["val/accuracy"] == "best 0.9000, last 0.8000" and "tags" not in facts
    assert as_json(entry)["path"] == str(tmp_path / "run")
