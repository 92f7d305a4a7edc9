"""The matrix of faults: which tests inject which, and what came of it.

`@pytest.mark.fault("SIGKILL of a rank", outcome="survived")` puts a test into it; `-m faults` runs those tests and
prints it at the end. A test that injects its fault more than once tells how often: `record_property("injected", 200)`.
"""

import ast
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from marked_part import read_part, write_part

OUTCOMES = {"survived": "survived to the bit", "refused": "refused cleanly", "went_on": "went on"}
BEGIN, END = "<!-- matrix of faults: written by the command above -->", "<!-- end of the matrix of faults -->"


@dataclass
class Fault:
    """What came of one fault, over the tests that inject it."""

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


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fault-matrix", metavar="FILE", help="write the matrix of faults into this file, with -m faults")


def pytest_itemcollected(item: pytest.Item) -> None:
    """`faults` selects all that inject one; what is repeated for long is for `-m soak` alone."""
    for mark in item.iter_markers("fault"):
        if len(mark.args) != 1 or not isinstance(mark.args[0], str) or mark.kwargs.get("outcome") not in OUTCOMES:
            raise pytest.UsageError(f'{item.nodeid}: fault("NAME", outcome=...) wants one of {", ".join(OUTCOMES)}')
        item.add_marker("faults")
        item.user_properties.append(("fault", (mark.args[0], mark.kwargs["outcome"])))  # travels with the reports
    if item.get_closest_marker("soak"):
        item.own_markers = [mark for mark in item.own_markers if mark.name != "thorough"]
        if item.get_closest_marker("thorough"):
            raise pytest.UsageError(f"{item.nodeid}: soak stands in a file or class that is thorough; mark its tests")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if "fault" not in config.option.markexpr:
        return
    reports = [report for each in terminalreporter.stats.values() for report in each]
    faults = collect(report for report in reports if isinstance(report, pytest.TestReport))
    if faults:
        table = render(faults)
        terminalreporter.section("matrix of faults")
        terminalreporter.write(table)
        if file := config.getoption("--fault-matrix"):
            write(Path(file), table)


def collect(reports: Iterable[pytest.TestReport]) -> dict[str, Fault]:
    """By name, from the reports of all phases of all tests, in the order in which they came."""
    found: dict[str, Fault] = {}
    for report in reports:
        for name, promised in [value for key, value in report.user_properties if key == "fault"]:
            fault = found.setdefault(name, Fault(promised))
            if fault.promised != promised:
                raise pytest.UsageError(f"{report.nodeid}: {name!r} is {fault.promised} elsewhere, not {promised}")
            fault.files.add(report.location[0])
            fault.seconds += report.duration
            if report.when == "call" and not report.skipped:
                told = [value for key, value in report.user_properties if key == "injected"]
                fault.injected[report.nodeid] = sum(told) or 1
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


def write(path: Path, table: str) -> None:
    """Put the table between the marks of a file; what it had of other faults stays. ValueError without the marks."""
    old = read_part(path, BEGIN, END)
    head, rows = table.splitlines()[:2], {name_of(line): line for line in table.splitlines()[2:]}
    lines = [line for line in old.strip().splitlines()[2:] if name_of(line) not in rows] + [*rows.values()]
    lines.sort(key=lambda line: (OUTCOMES["refused"] not in line, name_of(line).lower()))
    write_part(path, BEGIN, END, "\n".join([*head, *lines]) + "\n")


def name_of(row: str) -> str:
    return row.split(" | ")[0].removeprefix("| ")


def marked(folder: Path) -> dict[str, str]:
    """The promised outcome of every fault that a test of this folder is marked with, by name."""
    found = {}
    for path in sorted(folder.rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.fault":
                found[ast.literal_eval(node.args[0])] = ast.literal_eval(node.keywords[0].value)
    return found
