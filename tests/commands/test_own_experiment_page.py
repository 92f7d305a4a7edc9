"""docs/your_own_experiment.md, as printed there: its files, its commands, its claims on numbers, its messages."""

import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from commands import Commands
from pages import Page, finish
from parity import assert_equal
from worlds import MODES, Run, configure, run

from runner.training.components import make_parallel

PAGE = Page("your_own_experiment.md")


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = PAGE.write(tmp_path)
    monkeypatch.syspath_prepend(folder)
    names = [path.stem for path in folder.glob("*.py")]
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield folder
    for name in names:
        sys.modules.pop(name, None)  # README.md also has a module `ring`


def train(mine: Path, mode: str, *args: str) -> Run:
    """Train the language model for a few steps, on 2 ranks if the mode supports them."""
    few = (
        "data.longest=40",
        "batch_size=29",
        "max_steps=10",
        "epochs=9",
        "micro_batches=2",
        "eval_every_steps=7",
        "logger=none",
    )
    chosen = (f"hydra.searchpath=['file://{mine}']", "experiment=sentences", "precision=fp64", f"parallel={mode}")
    return run(mine.parent / mode, 1 if mode == "none" else 2, *chosen, *few, *args)


def test_every_piece_is_used_by_a_command() -> None:
    assert len(PAGE.commands) > 10
    for group, options in PAGE.options.items():
        assert options <= PAGE.chosen(group), group


def test_the_table_of_modes_matches_their_declarations() -> None:
    table = PAGE.text.partition("## Supported objectives\n\n")[2].partition("\n\n")[0]
    (_, *columns), _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    reported = set()
    for place, column in enumerate(columns, start=1):
        supported = ("supervised", "one_loss", "several_losses")[sum(row[place] == "yes" for row in rows) - 1]
        for mode in column.split(", "):
            name, _, option = mode.partition(" with ")
            reported.add(name)
            config, _ = configure(f"parallel={name}", *([f"parallel.{option}"] if option else []))
            assert make_parallel(config.parallel, {}).supported_objectives == supported, mode
    assert reported == {*MODES, "mesh"}


@pytest.mark.thorough
def test_the_modes_have_the_same_numbers(mine: Path) -> None:
    """The page's four modes, with 2 micro-batches on each rank and a single sample in an epoch's last step."""
    modes = [line.partition("parallel=")[2] or "none" for line in PAGE.commands if "precision=fp64" in line]
    assert modes == ["none", "ddp", "allreduce", "fsdp"]
    expected, *others = [train(mine, mode) for mode in modes]
    assert "val/bits" in expected.result["metrics"]
    for other in others:
        assert_equal(other, expected)


@pytest.mark.thorough
def test_the_custom_loss_equals_cross_entropy(mine: Path) -> None:
    assert_equal(train(mine, "ddp", "loss=padded"), train(mine, "none"))


@pytest.mark.thorough
@pytest.mark.parametrize("line", PAGE.commands)
def test_the_command_runs(line: str, mine: Path, commands: Commands) -> None:
    done = finish(line, commands, "max_steps=6")
    assert done.returncode == 0, done.stderr
    if "experiment=sentences" in line:
        assert "step 6: The " in done.stdout


@pytest.mark.thorough
@pytest.mark.parametrize("line", PAGE.refused)
def test_the_message_is_the_one_printed(
    line: str, mine: Path, here: Callable[..., int], capfd: pytest.CaptureFixture[str]
) -> None:
    typed = "python -m runner "
    assert line.startswith(typed)
    status = here(*shlex.split(line.removeprefix(typed)))
    output = capfd.readouterr().err.replace(str(mine.parent), "...").strip()
    assert (status, output) == (2, PAGE.refused[line])
    assert not (mine.parent / "outputs").exists()
