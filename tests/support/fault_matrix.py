"""The fault matrix: which tests inject which fault, and the outcome.

`@pytest.mark.fault("SIGKILL of a rank", outcome="survived")` adds a test to the matrix. `-m faults` runs these tests
and prints what they measured. A test that injects its fault several times records it:
`record_property("injected", 200)`.

    python tests/support/fault_matrix.py > tests/faults/matrix.md    # the promised outcomes, from the marks
"""

import ast
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

OUTCOMES = {"survived": "survived to the bit", "refused": "refused cleanly", "went_on": "continued"}
PAGE = """# The fault matrix

Written by `python tests/support/fault_matrix.py > tests/faults/matrix.md` from the marks of the tests.
[docs/reliability.md](../../docs/reliability.md#the-fault-matrix) explains the outcomes.

| fault | outcome | tests |
|---|---|---|
"""


@dataclass
class Fault:
    """The outcome of one fault over all tests that inject it."""

    promised: str
    injected: dict[str, int] = field(default_factory=dict)  # by test
    files: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    skipped: dict[str, str] = field(default_factory=dict)  # reason by test
    seconds: float = 0.0

    @property
    def outcome(self) -> str:
        if self.failed:
            return f"FAILED in {len(self.failed)} of {len(self.injected) + len(self.skipped)} tests"
        reasons = ", ".join(sorted(set(self.skipped.values())))
        if not self.injected:
            return f"skipped: {reasons}"
        return OUTCOMES[self.promised] + (f"; {len(self.skipped)} skipped: {reasons}" if self.skipped else "")


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark tests that inject a fault as `faults`. A test marked `soak` is not `thorough`."""
    for mark in item.iter_markers("fault"):
        if len(mark.args) != 1 or not isinstance(mark.args[0], str) or mark.kwargs.get("outcome") not in OUTCOMES:
            raise pytest.UsageError(f'{item.nodeid}: fault("NAME", outcome=...) needs one of {", ".join(OUTCOMES)}')
        item.add_marker("faults")
        item.user_properties.append(("fault", (mark.args[0], mark.kwargs["outcome"])))  # travels with the reports
    if item.get_closest_marker("soak"):
        item.own_markers = [mark for mark in item.own_markers if mark.name != "thorough"]
        if item.get_closest_marker("thorough"):
            raise pytest.UsageError(f"{item.nodeid}: soak test in a thorough file or class; mark its tests one by one")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if "fault" not in config.option.markexpr:
        return
    reports = [report for each in terminalreporter.stats.values() for report in each]
    faults = collect(report for report in reports if isinstance(report, pytest.TestReport))
    if faults:
        terminalreporter.section("fault matrix")
        terminalreporter.write(render(faults))


def collect(reports: Iterable[pytest.TestReport]) -> dict[str, Fault]:
    """Return the faults by name, from the reports of all phases of all tests."""
    found: dict[str, Fault] = {}
    for report in reports:
        for name, promised in [value for key, value in report.user_properties if key == "fault"]:
            fault = found.setdefault(name, Fault(promised))
            if fault.promised != promised:
                raise pytest.UsageError(f"{report.nodeid}: {name!r} is {fault.promised} elsewhere, not {promised}")
            fault.files.add(report.location[0])
            fault.seconds += report.duration
            if report.when == "call" and not report.skipped:
                reported = [value for key, value in report.user_properties if key == "injected"]
                fault.injected[report.nodeid] = sum(reported) or 1
            if report.failed:
                fault.failed.add(report.nodeid)
            elif report.skipped:
                fault.skipped[report.nodeid] = reason(report)
    return found


def reason(report: pytest.TestReport) -> str:
    return report.longrepr[2].removeprefix("Skipped: ") if isinstance(report.longrepr, tuple) else "expected to fail"


def render(faults: dict[str, Fault]) -> str:
    lines = ["| fault | injected | outcome | seconds | tests |", "|---|---|---|---|---|"]
    for name, fault in sorted(faults.items(), key=lambda each: (each[1].promised, each[0].lower())):
        files = ", ".join(sorted(file.removeprefix("tests/") for file in fault.files))
        injected = sum(fault.injected.values())
        lines.append(f"| {name} | {injected} | {fault.outcome} | {fault.seconds:.1f} | {files} |")
    return "\n".join(lines) + "\n"


@dataclass(frozen=True)
class Mark:
    """A fault with the outcome that a test file promises."""

    fault: str
    promised: str
    file: str


def read_marks(folder: Path) -> list[Mark]:
    """Return the marks of all tests below a directory."""
    found = []
    for path in sorted(folder.rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.fault":
                name, outcome = ast.literal_eval(node.args[0]), ast.literal_eval(node.keywords[0].value)
                found.append(Mark(name, outcome, str(path.relative_to(folder))))
    return found


def render_page(marks: Iterable[Mark]) -> str:
    """Return the page that lists each fault once, with all files that inject it."""
    files: dict[tuple[str, str], set[str]] = {}
    for mark in marks:
        files.setdefault((mark.promised, mark.fault), set()).add(mark.file)
    rows = sorted(files, key=lambda each: (each[0], each[1].lower()))
    lines = [f"| {name} | {OUTCOMES[outcome]} | {', '.join(sorted(files[outcome, name]))} |" for outcome, name in rows]
    return PAGE + "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(render_page(read_marks(Path(__file__).parents[1])), end="")
