"""Tests of custom directories: which file wins, and that a run finds them again."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from runner.config.custom_dirs import absolute_dirs, describe_hidden
from runner.config.diagnostics.import_target import locate
from runner.paths import ROOT
from runner.records.ledger import read_sweep

NET = """\
from torch import nn

class Net(nn.Module):
    def __init__(self, sample_shape: list[int], num_outputs: int, width: int = 4):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Flatten(), nn.Linear(sample_shape[0], width), nn.Linear(width, num_outputs)
        )

    def forward(self, inputs):
        return self.layers(inputs)
"""
NODE = "_target_: {}\nsample_shape: ${{data.sample_shape}}\nnum_outputs: ${{data.num_outputs}}\nwidth: {}\n"
SMALL = ("data=toy", "max_steps=2", "logger=none", "backend=gloo", "threads=1")


@pytest.fixture(autouse=True)
def forget(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sys, "path", [str(ROOT), *sys.path])  # as in a clone, which contains `models` and `data` too
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] in ("own_net", "models", "data")]:
        del sys.modules[name]


@pytest.fixture
def folders(tmp_path: Path) -> Path:
    """Create two custom directories, each with an mlp and a model of another name."""
    for folder, width in (("one", 3), ("two", 5)):
        (tmp_path / folder / "model").mkdir(parents=True)
        (tmp_path / folder / "model" / "mlp.yaml").write_text(NODE.format("own_net.Net", width))
        (tmp_path / folder / "model" / f"of_{folder}.yaml").write_text(NODE.format("own_net.Net", width + 1))
    (tmp_path / "one" / "own_net.py").write_text(NET)
    return tmp_path


def made(folder: Path) -> Path:
    return max((folder / "outputs" / "run").glob("*"), key=lambda path: path.stat().st_ctime)


def width(path: Path) -> int:
    return yaml.safe_load((path / "config.yaml").read_text())["model"]["width"]


def header(path: Path) -> list[str]:
    return [line for line in (path / "log.txt").read_text().splitlines() if line.startswith("custom ")]


def test_later_directory_wins_and_replaces_builtin_options(folders: Path, here: Callable[..., int]) -> None:
    assert here("--config-dir=one", "model=mlp", "-cd", "two", *SMALL) == 0
    assert width(made(folders)) == 5
    line = f"custom   model=mlp from {folders}/two instead of the built-in option of that name"
    assert header(made(folders)) == [line]


def test_all_directories_are_searched_and_new_names_are_not_announced(folders: Path, here: Callable[..., int]) -> None:
    for name in ("config.yaml", "schema.yaml"):  # a file outside of groups has no effect
        (folders / "one" / name).write_text("seed: 17\n")
    assert here("--config-dir", "one", "--config-dir", "two", "model=of_one", *SMALL) == 0
    assert (width(made(folders)), header(made(folders))) == (4, [])
    assert yaml.safe_load((made(folders) / "config.yaml").read_text())["seed"] == 0


def test_help_shows_the_option_that_wins(
    folders: Path, here: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    for number in (1, 2):
        (folders / ("one", "two")[number - 1] / "model" / "mlp.yaml").write_text(f"# number {number}\nwidth: 1\n")
    (folders / "two" / "config.yaml").write_text("seed: 17  # hidden\n")
    assert here("--config-dir", "one", "--config-dir", "two", "--help", "all") == 0
    output = capsys.readouterr().out
    assert "  mlp          number 2\n    model.width=1  int\n" in output and "number 1" not in output
    assert "of_one, of_two" in output
    assert "seed=17" not in output and "--config-dir DIR" in output


def test_run_is_resumed_and_evaluated_with_its_directories(folders: Path, here: Callable[..., int]) -> None:
    both = [f"--config-dir={folders}/one", f"--config-dir={folders}/two"]
    assert here(*both, "model=mlp", *SMALL) == 0
    run = made(folders)
    assert yaml.safe_load((run / "overrides.yaml").read_text())[:3] == [*both, "model=mlp"]
    assert here("resume=last", "max_steps=3") == 0
    assert width(run) == 5
    assert here("task=evaluate", "run=last") == 0
    assert width(made(folders)) == 5
    assert here("task=rerun", f"run={run}") == 0
    assert width(made(folders)) == 5


def test_moved_directory_must_be_named_again(
    folders: Path, here: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert here("--config-dir", "one", "model=of_one", *SMALL) == 0
    (folders / "one").rename(folders / "moved")
    capsys.readouterr()
    assert here("resume=last", "max_steps=3") == 2
    assert capsys.readouterr().err == (
        f"resume=last: its --config-dir={folders}/one no longer exists; add --config-dir=NEW_LOCATION\n"
    )
    assert here("resume=last", "max_steps=3", "--config-dir", "moved") == 0
    assert yaml.safe_load((made(folders) / "overrides.yaml").read_text())[0] == f"--config-dir={folders}/moved"


@pytest.mark.thorough
def test_sweeps_and_resumed_sweeps_use_the_directories(
    folders: Path, here: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    both = [f"--config-dir={folders}/one", f"--config-dir={folders}/two"]
    assert here("-m", *both, "model=mlp,of_one", *SMALL) == 0
    (sweep,) = (folders / "outputs" / "run").iterdir()
    assert {width(path.parent) for path in sweep.glob("*/config.yaml")} == {5, 4}
    assert read_sweep(sweep).config_dirs == [str(folders / "one"), str(folders / "two")]
    capsys.readouterr()
    assert here("-m", "resume=last", "model=of_two") == 0
    assert "2 jobs are done, 0 unfinished, 1 new" in capsys.readouterr().out


def test_runs_with_different_directories_cannot_share_a_sweep(
    folders: Path, here: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert here("--config-dir", "one", "model=mlp", *SMALL, "name=first") == 0
    assert here("model=mlp", *SMALL, "name=second") == 0
    (first,), (second,) = (list((folders / "outputs" / name).iterdir()) for name in ("first", "second"))
    capsys.readouterr()
    assert here("-m", "task=evaluate", f"run={first},{second}") == 2
    assert f"run={first},{second}: the runs have different custom directories" in capsys.readouterr().err


@pytest.mark.parametrize("target", ["models.own_net.Net", "data.Net"])
@pytest.mark.parametrize("launcher", ["env", pytest.param("spawn", marks=pytest.mark.thorough)])
def test_custom_modules_with_names_of_builtin_packages_are_found(
    target: str, launcher: str, folders: Path, here: Callable[..., int]
) -> None:
    file = folders / "one" / f"{target.rpartition('.')[0].replace('.', '/')}.py"
    file.parent.mkdir(exist_ok=True)
    file.write_text(NET)
    (folders / "one" / "model" / "own.yaml").write_text(NODE.format(target, 7))
    args = [f"launcher={launcher}", "parallel=ddp"] if launcher == "spawn" else []
    assert here("--config-dir", "one", "model=own", *SMALL, *args) == 0
    assert width(made(folders)) == 7
    assert here("model=mlp", *SMALL) == 0  # the runner's modules are unchanged


def test_custom_module_can_import_the_builtin_package(folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folders / "models.py").write_text("from runner.shipped.models.mlp import MLP\nclass Encoder(MLP): ...\n")
    monkeypatch.syspath_prepend(folders)
    monkeypatch.delitem(sys.modules, "models", raising=False)
    assert locate("models.mlp.MLP") in locate("models.Encoder").__mro__
    with pytest.raises(ValueError, match="models has no Decoder; did you mean Encoder"):
        locate("models.Decoder")


def test_header_line_names_replaced_options(folders: Path) -> None:
    one, two = str(folders / "one"), str(folders / "two")
    assert describe_hidden([one, two], {"model": "toy", "data": None, "experiment": "null"}) is None
    (folders / "two" / "callbacks").mkdir()
    (folders / "two" / "callbacks" / "none.yaml").write_text("")
    choices = {"model@model.model": "mlp", "callbacks": "[none, plot]", "data": "toy"}
    described = f"model@model.model=mlp from {two}, callbacks=none from {two}"
    assert describe_hidden([one, two], choices) == f"custom   {described} instead of the built-in option of that name"


def test_repeated_directory_keeps_its_last_position(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert absolute_dirs(["a", "b", f"{tmp_path}/a"]) == [f"{tmp_path}/b", f"{tmp_path}/a"]
