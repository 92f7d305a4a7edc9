"""benchmarks/suite.py and growth.py: their tables and formulas, and that they run. No test here asserts a speed."""

import importlib
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from commands import Commands
from data_sets import write_idx

from runner.paths import ROOT

BENCHMARKS = ROOT / "benchmarks"


@pytest.fixture(autouse=True)
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)


@pytest.fixture
def table() -> ModuleType:
    return importlib.import_module("suite_table")


@pytest.fixture
def growth_table() -> ModuleType:
    return importlib.import_module("growth_table")


def cell_of(table: ModuleType, peer: str, rates: Mapping[int, float]) -> Any:
    rounds = {number: {"samples_per_second": rate, "first_step_s": 4.0} for number, rate in rates.items()}
    return table.Cell("mlp", 2, peer, rounds)


@pytest.mark.parametrize(
    ("ratios", "expected"),
    [
        ([2.0, 2.2, 1.9], "2.00 (1.90 to 2.20)"),
        ([0.5, 0.6], "0.55 (0.50 to 0.60)"),
        ([1.1, 0.9, 1.2], "no difference seen (0.90 to 1.20)"),
        ([1.0, 1.2], "no difference seen (1.00 to 1.20)"),
        ([2.0], "2.00 (one round)"),
        ([], "-"),
    ],
)
def test_ratios_whose_range_includes_one_show_no_difference(
    table: ModuleType, ratios: list[float], expected: str
) -> None:
    assert table.describe(ratios) == expected


def test_ratios_are_paired_by_round(table: ModuleType) -> None:
    baseline = cell_of(table, "hand-written", {1: 100.0, 2: 50.0, 3: 100.0})
    runner = cell_of(table, "runner", {1: 150.0, 2: 80.0, 4: 1.0})  # failed in round 3
    assert table.paired_ratios(runner, baseline, "samples_per_second") == [1.5, 1.6]


def test_table_has_best_median_ratio_and_failures(table: ModuleType) -> None:
    rates = {"hand-written": [100.0, 110.0, 105.0], "runner": [150.0, 160.0, 170.0], "limit": [100.0, 200.0, 150.0]}
    cells = [cell_of(table, peer, dict(enumerate(values))) for peer, values in rates.items()]
    cells.append(table.Cell("mlp", 2, "fabric", failures=["status 1: it fell over"]))
    text = table.render(cells, "hand-written")
    rows = {line.split(" | ")[1]: line.split(" | ") for line in text.splitlines()[4:8]}
    assert rows["hand-written"][2:6] == ["110", "105", "-", "4.00"]
    assert rows["runner"][2:7] == ["170", "160", "1.50 (1.45 to 1.62)", "4.00", "no difference seen (1.00 to 1.00)"]
    assert rows["limit"][4] == "no difference seen (1.00 to 1.82)"
    assert rows["fabric"][2] == "-" and rows["fabric"][-1] == "0 |"
    assert "- fabric on 2 ranks: status 1: it fell over" in text


@pytest.mark.parametrize(
    ("script", "arguments", "expected"),
    [
        ("suite", "--work=convnt", "--work=convnt must be one of convnet, mlp"),
        ("suite", "--work=mlp --steps=301", "--steps=301 must be at least 2 and at most 300"),
        ("gpu", "--work=gpt-124", "--work=gpt-124 must be one of convnet, mlp"),
        ("growth", "--axis=rank", "--axis=rank must be one of ranks, samples, parameters"),
        ("growth", "--write=nowhere.md", "--write=nowhere.md must be a file with the lines <!-- growth"),
    ],
)
def test_invalid_arguments_are_refused_before_anything_runs(
    script: str,
    arguments: str,
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", [script, *arguments.split()])
    with pytest.raises(SystemExit, match="2"):
        importlib.import_module(script).main()
    printed = capsys.readouterr()
    assert expected in printed.err and not printed.out


@pytest.mark.thorough
def test_suite_measures_and_writes_a_row_for_each_command(commands: Commands, tmp_path: Path) -> None:
    write_idx(tmp_path / "data", num_train=1600, num_val=2000)
    page = tmp_path / "page.md"
    page.write_text("<!-- measured: written by the command above -->\n<!-- end of what was measured -->\n")
    args = ["--work=mlp", "--nproc=1", "--only=hand-written,runner", "--runner=threads=0", "--rounds=1", "--steps=8"]
    args += [f"--root={tmp_path / 'data'}", f"--write={page}"]
    done = commands.finish(commands.start(str(BENCHMARKS / "suite.py"), *args))
    assert done.returncode == 1, done.stderr  # for the last row, which is refused
    rows = [line.split(" | ") for line in page.read_text().splitlines() if line.startswith("| 1 |")]
    assert [(row[1], row[-1]) for row in rows] == [
        ("hand-written", "1 |"),
        ("runner", "1 |"),
        ("runner threads=0", "0 |"),
    ]
    measured = [float(cell.replace(",", "")) for row in rows[:2] for cell in (row[2], row[5], *row[7:11])]
    assert all(figure > 0 for figure in measured), measured
    assert "- runner threads=0 on 1 rank: status 2: " in page.read_text()
    assert (tmp_path / "images" / "benchmarks.png").stat().st_size > 0


def measured_without_a_gpu(commands: Commands, folder: Path, *args: str) -> tuple[list[list[str]], str]:
    """Return the table rows of benchmarks/gpu.py for the workload mlp, and its output."""
    write_idx(folder, num_train=2400, num_val=800)
    words = (*args, "--work=mlp", "--steps=6", f"--root={folder}", "--rounds=1")
    done = commands.finish(commands.start(str(BENCHMARKS / "gpu.py"), *words))
    assert done.returncode == 0, done.stderr
    return [line.split(" | ") for line in done.stdout.splitlines() if line.startswith("| mlp |")], done.stdout


@pytest.mark.thorough
def test_gpu_measures_without_a_gpu(commands: Commands, tmp_path: Path) -> None:
    (row,), output = measured_without_a_gpu(commands, tmp_path, "--variant=bf16")
    assert row[1] == "bf16" and all(float(cell.replace(",", "")) > 0 for cell in row[2:7])
    assert "- checks: no GPU" in output


@pytest.mark.thorough
def test_gpu_compares_settings_without_a_gpu(commands: Commands, tmp_path: Path) -> None:
    rows, _ = measured_without_a_gpu(commands, tmp_path, "--settings")
    assert [row[2] for row in rows] == ["`defaults`", "`keep_samples=device`"]
    assert all(float(cell.replace(",", "")) > 0 for row in rows for cell in row[3:6])


def figures(step_s: float, other_s: float = 1.0) -> dict[str, float]:
    others = dict.fromkeys(("first_step_s", "evaluation_s", "checkpoint_s"), other_s)
    return {"step_s": step_s, "memory_mib": 100.0, "command_s": 9.0, **others}


def test_formula_is_fitted_to_the_best_rounds(growth_table: ModuleType) -> None:
    cells = []
    for ranks in (1, 2, 4, 8, 16, 32):
        steps = [9.0, 0.010 + 0.002 * ranks] if ranks > 1 else [0.001, 0.001]  # one round was disturbed
        cells.append(growth_table.Cell("ranks", ranks, *([figures(step) for step in steps] for _ in range(2))))
    line = growth_table.fitted(cells, growth_table.AXES["ranks"], "step_s", cores=2)
    assert (line.start, line.slope) == (pytest.approx(0.010), pytest.approx(0.002))
    assert line.off < 1e-9 and line.at(1024) == pytest.approx(2.058)
    rows = [row.split(" | ") for row in growth_table.render(cells, cores=2).splitlines()]
    tables = {row[0].removeprefix("| "): row for row in rows if row[0].removeprefix("| ").isdigit()}
    assert tables["8"][1:4] == ["26.0 (4,513)", "6.50 (1,128)", "no difference seen"]
    formulas = {row[1]: row[2:] for row in rows if row[0] == "| ranks"}
    assert formulas["step, ms"] == ["10.0 + 2.00 x ranks", "0%", "1,024 ranks: 2,058 |"]
    assert formulas["checkpoint, s"] == ["1.00 (constant)", "0%", "1,024 ranks: 1.00 |"]
