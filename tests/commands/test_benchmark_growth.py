"""benchmarks/growth.py: what its tables and formulas say, and that it runs. Nothing is about how fast anything is."""

import importlib
from pathlib import Path
from types import ModuleType

import pytest
from commands import Commands

from runner import ROOT

BENCHMARKS = ROOT / "benchmarks"


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("growth_table")


@pytest.fixture
def growth(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("growth")


def figures(step_s: float, other_s: float = 1.0) -> dict[str, float]:
    others = dict.fromkeys(("first_step_s", "evaluation_s", "checkpoint_s"), other_s)
    return {"step_s": step_s, "memory_mib": 100.0, "command_s": 9.0, **others}


def test_the_formula_is_that_of_what_grows(table: ModuleType) -> None:
    """a + b n is found again, where the two best rounds agree; what does not grow is level, what varies is left out."""
    cells = []
    for ranks in (1, 2, 4, 8, 16, 32):
        steps = [9.0, *[0.010 + 0.002 * ranks] * 3] if ranks > 1 else [0.001, 0.001]  # one round was disturbed
        steps = [0.5, 5.0] if ranks == 16 else steps
        cells.append(table.Cell("ranks", ranks, *([figures(step) for step in steps] for _ in range(2))))
    line = table.fitted(cells, table.AXES["ranks"], "step_s", cores=2)
    assert (line.start, line.slope) == (pytest.approx(0.010), pytest.approx(0.002))
    assert line.off < 1e-9 and line.at(1024) == pytest.approx(2.058)
    busy = [*cells[:-1], table.Cell("ranks", 32, [figures(0.05), figures(0.07)])]
    assert table.fitted(busy, table.AXES["ranks"], "step_s", cores=2) is None  # the largest is not known
    rows = [row.split(" | ") for row in table.render(cells, cores=2).splitlines()]
    tables = {row[0].removeprefix("| "): row for row in rows if row[0].removeprefix("| ").isdigit()}
    assert tables["8"][1:6] == ["26.0 (26.0)", "6.50 (6.50)", "under 0", "1.00 (1.00)", "1.00 (1.00)"]
    assert tables["16"][1].startswith("too busy: ") and tables["1"][1:3] == ["1.00 (1.00)"] * 2
    formulas = {row[1]: row[2:] for row in rows if row[0] == "| ranks"}
    assert formulas["step, ms"] == ["10.0 + 2.00 x ranks", "0%", "1,024 ranks: 2,058 |"]
    assert formulas["checkpoint, s"] == ["1.00, whatever they are", "0%", "1,024 ranks: 1.00 |"]


def test_logging_is_a_figure_only_above_what_rounds_vary_by(table: ModuleType) -> None:
    def said(logged: list[float], silent: list[float]) -> str:
        cell = table.Cell("samples", 10, *([figures(step) for step in steps] for steps in (logged, silent)))
        return table.logging(cell)

    assert said([0.0031, 0.0900, 0.0030], [0.0020, 0.0021]) == "1.00"
    assert said([0.0030, 0.0034], [0.0028, 0.0030]) == "under 0.600"
    assert said([0.0030], [0.0020]) == "one round" and said([], []) == "-"


def test_a_size_that_does_not_fit_into_memory_is_left_out_and_named(growth: ModuleType) -> None:
    lines = growth.left_out([("ranks", 1), ("ranks", 32), ("parameters", 10**8)], free=2000.0)
    assert list(lines.values()) == [
        "32 ranks are left out: they need about 9,600 MiB, and 2,000 are free",
        "100,000,000 parameters are left out: they need about 2,507 MiB, and 2,000 are free",
    ]
    widths = [growth.width_of(size) for size in growth.AXES["parameters"].sizes]
    counts = [33 * width + width * (width + 1) + 10 * (width + 1) for width in widths]
    assert counts == pytest.approx(growth.AXES["parameters"].sizes, rel=0.01)


def test_what_does_not_fit_is_refused_before_anything_is_measured(commands: Commands) -> None:
    for words, said in {
        ("--axis=rank",): "--axis=rank must be one of ranks, samples, parameters",
        ("--axis=samples", "--most=10"): "--most=10 leaves nothing; try 1000",
        ("--write=nowhere.md",): "--write=nowhere.md must be a file with the lines <!-- growth",
    }.items():
        done = commands.finish(commands.start(str(BENCHMARKS / "growth.py"), *words))
        assert done.returncode == 2 and said in done.stderr and not done.stdout, done.stderr


@pytest.mark.thorough
def test_it_measures_and_writes_a_row_for_each_size(commands: Commands, table: ModuleType, tmp_path: Path) -> None:
    table.MEASURED.check(ROOT / "docs" / "benchmarks.md")
    page = tmp_path / "page.md"
    page.write_text(f"{table.MEASURED.begin}\n{table.MEASURED.end}\n")
    words = ["--axis=ranks", "--most=1", "--rounds=1", "--cores=2", f"--write={page}"]
    done = commands.finish(commands.start(str(BENCHMARKS / "growth.py"), *words))
    assert done.returncode == 0, done.stderr
    (row,) = [line.split(" | ") for line in page.read_text().splitlines() if line.startswith("| 1 |")]
    assert row[1:4] == ["one round"] * 3 and row[-1] == "1 |"
    of_two = [cell if cell.startswith("too busy: ") else float(cell.partition(" (")[0]) for cell in row[4:7]]
    assert all(isinstance(cell, str) or cell > 0 for cell in of_two) and float(row[7]) > 100
    assert (tmp_path / "images" / "growth.png").stat().st_size > 0
