"""What a run says of itself, and what becomes of a model that ends the process."""

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from own_folders import write_files

EXITING = """\
import sys
from torch import nn

class Exits(nn.Module):
    def __init__(self, sample_shape: list[int], num_outputs: int, where: str = "init"):
        super().__init__()
        self.layer, self.where = nn.Linear(sample_shape[0], num_outputs), where
        if where == "init":
            sys.exit("no more")

    def forward(self, inputs):
        if self.where == "forward" and self.training:
            sys.exit(3)
        return self.layer(inputs)
"""
FUNCTIONS = """\
def squared(outputs, targets, factor: float = 1.0):
    return factor * ((outputs - targets) ** 2).mean()

def halved(step, num_steps, steps_per_epoch, floor: float = 0.0):
    return max(floor, 0.5**step)
"""
FILES = {
    "mine/told_exiting.py": EXITING,
    "mine/told_functions.py": FUNCTIONS,
    "mine/model/exits.yaml": "_target_: told_exiting.Exits\nsample_shape: ${data.sample_shape}\n"
    "num_outputs: ${data.num_outputs}\nwhere: init\n",
    "mine/told_task.py": "from runner.tasks.evaluate import Evaluate\nclass MeasuredOtherwise(Evaluate):\n"
    "    min_world_size = 3\n",
    "mine/task/own.yaml": "_target_: told_task.MeasuredOtherwise\n",
    "mine/loss/squared.yaml": "_target_: told_functions.squared\n_partial_: true\nfactor: 1.0\n",
    "mine/scheduler/halved.yaml": "_target_: told_functions.halved\n_partial_: true\nfloor: 0.0\n",
}
SMALL = ("--config-dir", "mine", "data=toy", "max_steps=3", "batch_size=16", "backend=gloo", "threads=1")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(sys, "path", list(sys.path))
    write_files(tmp_path, FILES)
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith("told_")]:
        del sys.modules[name]


def result(folder: Path, name: str) -> dict[str, object]:
    (path,) = (folder / "outputs" / name).iterdir()
    return json.loads((path / "result.json").read_text())


def test_a_sweep_survives_models_that_exit(
    folder: Path, here: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert here("-m", *SMALL, "model=exits", "model.where=init,forward,nowhere", "logger=none") == 1
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("0-where-init ") and line.endswith("SystemExit: no more") for line in lines)
    assert any(line.startswith("1-where-forward ") and line.endswith("SystemExit: 3") for line in lines)
    assert lines[-1].startswith("1 of 3 jobs finished")
    states = {
        path.parent.name: json.loads(path.read_text())["state"] for path in (folder / "outputs").rglob("result.json")
    }
    assert states == {"0-where-init": "failed", "1-where-forward": "failed", "2-where-nowhere": "finished"}


def test_a_file_that_exits_when_it_is_imported_is_refused(
    folder: Path, here: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "mine" / "told_script.py").write_text("import sys\nsys.exit(0)\n")
    assert here(*SMALL, "model._target_=told_script.Net") == 2
    said = capsys.readouterr().err
    assert said.startswith("model._target_=told_script.Net: importing told_script failed at ")
    assert said.endswith("told_script.py:2: SystemExit: 0\n")


def test_a_task_is_named_as_it_was_chosen(here: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    for words, said in (
        (("task=own",), "task=own needs the run to read; type run=last"),
        (("task=own", "run=last", "profile=true"), "profile=true has no effect on task=own; drop it"),
        (("task=own", "run=last"), "task=own needs at least 3 ranks, and this world has 1; try launcher=spawn"),
    ):
        assert here(*SMALL, "model=toy", "logger=none") == 0
        capsys.readouterr()
        assert here("--config-dir", "mine", *words) == 2
        assert said in capsys.readouterr().err


@pytest.mark.parametrize(("mode", "warned"), [("ddp", True), ("none", False)])
def test_a_mode_that_spreads_over_one_process_says_so(
    mode: str, warned: bool, here: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert here(*SMALL, "model=toy", f"parallel={mode}", "logger=none") == 0
    warning = (
        f"warning: parallel={mode} has one process, and spreads nothing; to start more, type launcher=spawn "
        "launcher.nproc_per_node=2, or torchrun --nproc-per-node 2 -m runner\n"
    )
    assert (warning in capsys.readouterr().out) == warned


@pytest.mark.parametrize(("logger", "shown"), [("tensorboard", True), ("none", False)])
def test_the_dashboard_is_named_where_there_is_something_to_see(
    logger: str, shown: bool, here: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert here(*SMALL, "model=toy", f"logger={logger}") == 0
    assert ("dashboard: tensorboard --logdir" in capsys.readouterr().out) == shown


def test_a_function_is_a_loss_and_a_schedule(folder: Path, here: Callable[..., int]) -> None:
    assert here(*SMALL, "model=toy", "loss=mse", "logger=none", "name=module") == 0
    assert here(*SMALL, "model=toy", "loss=squared", "logger=none", "name=function") == 0
    assert result(folder, "function")["weights_sha256"] == result(folder, "module")["weights_sha256"]
    words = ("model=toy", "loss=squared", "loss.factor=2", "scheduler=halved", "scheduler.floor=0.4", "name=halved")
    assert here(*SMALL, *words) == 0
    (path,) = (folder / "outputs" / "halved").iterdir()
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    rates = [line["train/learning_rate"] for line in lines if "train/learning_rate" in line]
    assert rates == pytest.approx([rates[0], rates[0] * 0.5, rates[0] * 0.4])
    first = json.loads(next((folder / "outputs" / "module").glob("*/metrics.jsonl")).read_text().splitlines()[0])
    assert lines[0]["train/loss"] == pytest.approx(2 * first["train/loss"])
