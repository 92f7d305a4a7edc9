"""docs/reliability.md names every fault that a test injects, with its outcome, and no other."""

import re
from pathlib import Path

from fault_matrix import BEGIN, END, OUTCOMES, marked
from marked_part import read_part

ROOT = Path(__file__).parents[2]
COMMAND = 'python -m pytest -m "faults and not soak" --fault-matrix=docs/reliability.md'


def test_the_page_has_a_row_for_every_marked_fault_and_no_other() -> None:
    page = ROOT / "docs" / "reliability.md"
    assert COMMAND in page.read_text()
    table = read_part(page, BEGIN, END)
    rows = re.findall(r"^\| (.*?) \| .*? \| (.*?) \|", table, re.MULTILINE)
    reported = {name: outcome for name, outcome in rows if name not in ("fault", "---")}
    faults = marked(ROOT / "tests")
    assert sorted(faults.keys() - reported.keys()) == [], (
        f"lack a row: add `| NAME | times | outcome | - | file |`, or run {COMMAND}"
    )
    assert sorted(reported.keys() - faults.keys()) == [], "no test is marked with these"
    for name, outcome in reported.items():
        assert outcome.startswith(OUTCOMES[faults[name]]), f"{name}: {outcome}"
