"""tests/faults/matrix.md lists every fault that a test injects, with its outcome, and no other."""

from pathlib import Path

from fault_matrix import read_marks, render_page

TESTS = Path(__file__).parents[1]


def test_the_page_has_a_row_for_every_marked_fault_and_no_other() -> None:
    page = (TESTS / "faults" / "matrix.md").read_text()
    assert page == render_page(read_marks(TESTS)), "run python tests/support/fault_matrix.py > tests/faults/matrix.md"


def test_a_fault_has_one_outcome() -> None:
    outcomes: dict[str, set[str]] = {}
    for mark in read_marks(TESTS):
        outcomes.setdefault(mark.fault, set()).add(mark.promised)
    assert {fault: promised for fault, promised in outcomes.items() if len(promised) > 1} == {}
