"""benchmarks/suite.py: what its tables say, and that it runs. Nothing here is about how fast anything is."""

import importlib
from pathlib import Path
from types import ModuleType

import pytest
from commands import Commands
from data_sets import write_idx

from runner import ROOT

SUITE = ROOT / "benchmarks"


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(SUITE)
    return importlib.import_module("suite_table")


@pytest.mark.parametrize(
    ("values", "yardstick", "said"),
    [
        ([2.0, 2.1, 2.2], [1.0, 1.05, 1.1], "2.00"),
        ([2.0, 2.1, 2.4], [1.0, 1.05, 1.1], "too busy: 19%"),
        ([2.0, 2.1, 2.2], [1.0, 1.05, 1.2], "too busy: 19%"),
        ([2.0], [1.0], "one round"),
        ([], [1.0, 1.0], "-"),
        ([2.0, 2.1], [], "-"),
    ],
)
def test_a_ratio_is_given_only_where_the_rounds_agree(
    table: ModuleType, values: list[float], yardstick: list[float], said: str
) -> None:
    assert table.ratio(values, yardstick) == said


def test_the_table_has_best_median_spread_and_what_failed(table: ModuleType) -> None:
    rates = {"hand-written": [100.0, 110.0, 105.0], "runner": [150.0, 160.0, 170.0], "limit": [100.0, 200.0, 150.0]}
    cells = [
        table.Cell("mlp", 2, peer, [{"samples_per_second": rate, "first_step_s": 4.0} for rate in values])
        for peer, values in rates.items()
    ]
    cells.append(table.Cell("mlp", 2, "fabric", failures=["status 1: it fell over"]))
    rows = {line.split(" | ")[1]: line.split(" | ") for line in table.render(cells, "hand-written").splitlines()[4:8]}
    assert rows["hand-written"][2:8] == ["110", "105", "10%", "1.00", "1.00", "4.00"]
    assert rows["runner"][2:9] == ["170", "160", "12%", "1.55", "1.52", "4.00", "1.00"]
    assert rows["limit"][4:7] == ["67%", "too busy: 67%", "too busy: 67%"]
    assert rows["fabric"][2] == "-" and rows["fabric"][-1] == "0 |"
    assert "- fabric on 2 ranks: status 1: it fell over" in table.render(cells, "hand-written")


def test_the_page_has_a_place_for_what_is_measured(table: ModuleType, tmp_path: Path) -> None:
    section = table.MEASURED
    section.check(ROOT / "docs" / "benchmarks.md")
    page = tmp_path / "page.md"
    page.write_text(f"before\n\n{section.begin}\nold\n{section.end}\n\nafter\n")
    section.write(page, "new\n")
    section.write(page, "newer\n")
    assert page.read_text() == f"before\n\n{section.begin}\n\nnewer\n\n{section.end}\n\nafter\n"
    page.write_text("nothing here")
    with pytest.raises(ValueError, match=r"docs/benchmarks\.md"):
        section.check(page)


def test_a_peer_that_is_not_installed_is_named_with_its_pip_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(SUITE)
    peers = importlib.import_module("peers.commands")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name in ("lightning", "ignite") else name)
    assert peers.missing(["hand-written", "runner", "fabric", "accelerate", "ignite"]) == {
        "fabric": "pip install lightning",
        "ignite": "pip install pytorch-ignite",
    }


def test_what_does_not_fit_is_refused_before_anything_is_measured(commands: Commands) -> None:
    for words, said in {
        ("--work=convnt",): "--work=convnt must be one of convnet, mlp",
        ("--work=mlp", "--nproc=3"): "--nproc=3 must divide mlp's batch of 200",
        ("--work=mlp", "--steps=301"): "--steps=301 must be at least 2 and at most 300",
        ("--write=nowhere.md",): "--write=nowhere.md must be a file with the lines",
    }.items():
        done = commands.finish(commands.start(str(SUITE / "suite.py"), *words))
        assert done.returncode == 2 and said in done.stderr and not done.stdout, done.stderr


@pytest.mark.thorough
def test_it_measures_and_writes_a_row_for_each(commands: Commands, tmp_path: Path) -> None:
    write_idx(tmp_path / "data", num_train=1600, num_val=2000)
    page = tmp_path / "page.md"
    page.write_text("<!-- measured: written by the command above -->\n<!-- end of what was measured -->\n")
    words = ["--work=mlp", "--nproc=1", "--only=hand-written,runner", "--runner=threads=0", "--rounds=1", "--steps=8"]
    words += [f"--root={tmp_path / 'data'}", f"--write={page}"]
    done = commands.finish(commands.start(str(SUITE / "suite.py"), *words))
    assert done.returncode == 1, done.stderr  # for the last row, which is refused
    rows = [line.split(" | ") for line in page.read_text().splitlines() if line.startswith("| 1 |")]
    assert [(row[1], row[-1]) for row in rows] == [
        ("hand-written", "1 |"),
        ("runner", "1 |"),
        ("runner threads=0", "0 |"),
    ]
    measured = [float(cell.replace(",", "")) for row in rows[:2] for cell in (row[2], row[7], *row[9:13])]
    assert all(figure > 0 for figure in measured), measured
    assert "- runner threads=0 on 1 rank: status 2: " in page.read_text()
    assert (tmp_path / "images" / "benchmarks.png").stat().st_size > 0
