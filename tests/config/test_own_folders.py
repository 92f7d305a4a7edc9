"""A user's own folders: what in them counts, and that a run finds them again."""

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

import runner
from runner.config.own_folders import absolute, hiding
from runner.runs.ledger import read_sweep

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
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    runner._others.clear()
    for name in [name for name in sys.modules if name.startswith(("own_net", "models.own_"))]:
        del sys.modules[name]


@pytest.fixture
def folders(tmp_path: Path) -> Path:
    """Two folders, each with an mlp and a model of its own."""
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
    return [line for line in (path / "log.txt").read_text().splitlines() if line.startswith("own ")]


def test_ones_own_file_hides_the_built_in_of_its_name(folders: Path, here: Callable[..., int]) -> None:
    assert here("--config-dir", "one", "model=mlp", *SMALL) == 0
    assert width(made(folders)) == 3
    assert header(made(folders)) == [f"own      model=mlp of {folders}/one, not the runner's option of that name"]


def test_of_two_folders_the_later_counts(folders: Path, here: Callable[..., int]) -> None:
    assert here("--config-dir=one", "model=mlp", "-cd", "two", *SMALL) == 0
    assert width(made(folders)) == 5
    assert header(made(folders)) == [f"own      model=mlp of {folders}/two, not the runner's option of that name"]


def test_both_folders_are_searched_and_a_name_of_ones_own_is_not_told(folders: Path, here: Callable[..., int]) -> None:
    for option, expected in (("of_one", 4), ("of_two", 6)):
        assert here("--config-dir", "one", "--config-dir", "two", f"model={option}", *SMALL, f"name={option}") == 0
        (path,) = (folders / "outputs" / option).iterdir()
        assert (width(path), header(path)) == (expected, [])


def test_help_shows_what_would_be_taken(
    folders: Path, here: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    for number in (1, 2):
        (folders / ("one", "two")[number - 1] / "model" / "mlp.yaml").write_text(f"# number {number}\nwidth: 1\n")
    (folders / "two" / "config.yaml").write_text("seed: 17  # nobody's\n")
    assert here("--config-dir", "one", "--config-dir", "two", "--help", "all") == 0
    said = capsys.readouterr().out
    assert "  mlp          number 2\n    model.width=1\n" in said and "number 1" not in said
    assert "of_one, of_two" in said
    assert "nobody's" not in said and "--config-dir DIR" in said


def test_a_file_outside_of_any_group_hides_nothing(folders: Path, here: Callable[..., int]) -> None:
    for name in ("config.yaml", "schema.yaml"):
        (folders / "one" / name).write_text("seed: 17\n")
    assert here("--config-dir", "one", "model=toy", *SMALL) == 0
    assert yaml.safe_load((made(folders) / "config.yaml").read_text())["seed"] == 0


def test_hydra_is_asked_about_the_same_files(
    folders: Path, here: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert here("--config-dir", "one", "--config-dir", "two", "model=mlp", "--cfg", "job", "--package", "model") == 0
    assert "width: 5" in capsys.readouterr().out
    assert here("--config-dir", "one", "model=mlp", *SMALL) == 0
    capsys.readouterr()
    assert here("resume=last", "--cfg", "job", "--package", "model") == 0
    assert "width: 3" in capsys.readouterr().out


def test_a_run_is_resumed_and_evaluated_with_its_folders(folders: Path, here: Callable[..., int]) -> None:
    both = [f"--config-dir={folders}/one", f"--config-dir={folders}/two"]
    assert here(*both, "model=mlp", *SMALL) == 0
    run = made(folders)
    assert yaml.safe_load((run / "overrides.yaml").read_text())[:3] == [*both, "model=mlp"]
    assert here("resume=last", "max_steps=3") == 0
    assert width(run) == 5
    assert yaml.safe_load((run / "overrides.yaml").read_text())[:3] == [*both, "model=mlp"]
    assert here("task=evaluate", "run=last") == 0
    assert width(made(folders)) == 5
    assert here("task=rerun", f"run={run}") == 0
    assert width(made(folders)) == 5


def test_what_is_typed_on_resuming_counts_more_than_what_was_recorded(folders: Path, here: Callable[..., int]) -> None:
    assert here("--config-dir", "one", "model=of_one", *SMALL) == 0
    run = made(folders)
    assert here("task=evaluate", f"run={run}", "--config-dir", "two", "name=more") == 0
    (path,) = (folders / "outputs" / "more").iterdir()
    typed = yaml.safe_load((path / "overrides.yaml").read_text())
    assert typed[:2] == [f"--config-dir={folders}/one", f"--config-dir={folders}/two"]


def test_a_folder_that_has_moved_must_be_named_again(
    folders: Path, here: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert here("--config-dir", "one", "model=mlp", *SMALL) == 0
    (folders / "one").rename(folders / "moved")
    capsys.readouterr()
    assert here("resume=last", "max_steps=3") == 2
    assert capsys.readouterr().err == (
        f"resume=last: its --config-dir={folders}/one is not there any more; type --config-dir=DIR with where it is "
        "now\n"
    )
    assert here("resume=last", "max_steps=3", "--config-dir", "moved") == 0
    assert yaml.safe_load((made(folders) / "overrides.yaml").read_text())[0] == f"--config-dir={folders}/moved"


def test_the_jobs_of_a_sweep_have_them_and_so_has_a_resumed_one(
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
    # each job is a run that the jobs of another sweep read
    jobs = sorted(str(path.parent) for path in sweep.glob("*/result.json"))
    assert here("-m", "task=evaluate", f"run={','.join(jobs)}", "name=all") == 0
    (evaluated,) = (folders / "outputs" / "all").iterdir()
    assert len(list(evaluated.glob("*/result.json"))) == 3


def test_runs_with_unlike_folders_are_no_sweep(
    folders: Path, here: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert here("--config-dir", "one", "model=mlp", *SMALL, "name=first") == 0
    assert here("model=mlp", *SMALL, "name=second") == 0
    (first,), (second,) = (list((folders / "outputs" / name).iterdir()) for name in ("first", "second"))
    capsys.readouterr()
    assert here("-m", "task=evaluate", f"run={first},{second}") == 2
    said = capsys.readouterr().err
    assert f"run={first} was made with --config-dir={folders}/one and run={second} with no --config-dir" in said


def test_a_ledger_of_an_older_version_names_one_folder(tmp_path: Path) -> None:
    for folder, expected in (("/mine", ["/mine"]), (None, [])):
        sweep = {"typed": [], "config_dir": folder, "command": [], "shared": {}}
        (tmp_path / "ledger.jsonl").write_text(json.dumps({"sweep": sweep}) + "\n")
        assert read_sweep(tmp_path).config_dirs == expected


@pytest.mark.parametrize("target", ["models.Net", "models.own_net.Net", "data.Net"])
@pytest.mark.parametrize("launcher", ["env", pytest.param("spawn", marks=pytest.mark.thorough)])
def test_modules_that_are_named_as_built_in_ones_are_found(
    target: str, launcher: str, folders: Path, here: Callable[..., int]
) -> None:
    file = folders / "one" / f"{target.rpartition('.')[0].replace('.', '/')}.py"
    file.parent.mkdir(exist_ok=True)
    file.write_text(NET)
    (folders / "one" / "model" / "own.yaml").write_text(NODE.format(target, 7))
    words = [f"launcher={launcher}", "parallel=ddp"] if launcher == "spawn" else []
    assert here("--config-dir", "one", "model=own", *SMALL, *words) == 0
    assert width(made(folders)) == 7
    assert here("model=mlp", *SMALL) == 0  # those of the runner are what they were


def test_a_module_of_ones_own_imports_from_both(folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folders / "models.py").write_text(
        "from models.mlp import MLP\nclass Encoder(MLP): ...\n"
        "def build():\n    from models import Encoder\n    return Encoder\n"
    )
    monkeypatch.syspath_prepend(folders)
    import models

    assert models.build() is models.Encoder
    assert models.mlp.MLP in models.Encoder.__mro__
    assert "Encoder" in dir(models) and models.__file__ == str(runner.ROOT / "models" / "__init__.py")
    with pytest.raises(AttributeError, match="has no attribute 'Decoder'"):
        models.Decoder  # noqa: B018


def test_the_line_of_the_header(folders: Path) -> None:
    one, two = str(folders / "one"), str(folders / "two")
    for group, option in (("callbacks", "none"), ("hydra/sweeper", "grid")):
        (folders / "two" / group).mkdir(parents=True)
        (folders / "two" / group / f"{option}.yaml").write_text("")
    assert hiding([one, two], {"model": "toy", "data": None, "experiment": "null"}) is None
    choices = {"model@model.model": "mlp", "callbacks": "[none, plot]", "hydra/sweeper": "grid", "data": "toy"}
    assert hiding([one, two], choices) == (
        f"own      model@model.model=mlp and callbacks=none and hydra/sweeper=grid of {two}, not the runner's option "
        "of that name"
    )
    assert hiding([], choices) is None


def test_a_folder_that_is_named_twice_counts_where_it_was_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert absolute(["a", "b", f"{tmp_path}/a"]) == [f"{tmp_path}/b", f"{tmp_path}/a"]
