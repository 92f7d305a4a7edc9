"""Messages of commands about tasks, modes and loggers, and models that call sys.exit."""

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from custom_files import write_files

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
    "mine/messages_exiting.py": EXITING,
    "mine/messages_functions.py": FUNCTIONS,
    "mine/model/exits.yaml": "_target_: messages_exiting.Exits\nsample_shape: ${data.sample_shape}\n"
    "num_outputs: ${data.num_outputs}\nwhere: init\n",
    "mine/messages_task.py": "from runner.tasks.evaluate import Evaluate\nclass OtherEvaluate(Evaluate):\n"
    "    min_world_size = 3\n",
    "mine/task/own.yaml": "_target_: messages_task.OtherEvaluate\n",
    "mine/loss/squared.yaml": "_target_: messages_functions.squared\n_partial_: true\nfactor: 1.0\n",
    "mine/scheduler/halved.yaml": "_target_: messages_functions.halved\n_partial_: true\nfloor: 0.0\n",
}
SMALL = ("--config-dir", "mine", "data=toy", "max_steps=3", "batch_size=16", "backend=gloo", "threads=1")


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(sys, "path", list(sys.path))
    write_files(tmp_path, FILES)
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith("messages_")]:
        del sys.modules[name]


def result(directory: Path, name: str) -> dict[str, object]:
    (path,) = (directory / "outputs" / name).iterdir()
    return json.loads((path / "result.json").read_text())


def test_a_sweep_continues_after_models_that_exit(
    directory: Path, here: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert here("-m", *SMALL, "model=exits", "model.where=init,forward,nowhere", "logger=none") == 1
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("0-where-init ") and line.endswith("SystemExit: no more") for line in lines)
    assert any(line.startswith("1-where-forward ") and line.endswith("SystemExit: 3") for line in lines)
    assert lines[-1].startswith("1 of 3 jobs finished")
    states = {
        path.parent.name: json.loads(path.read_text())["state"] for path in (directory / "outputs").rglob("result.json")
    }
    assert states == {"0-where-init": "failed", "1-where-forward": "failed", "2-where-nowhere": "finished"}


def test_a_module_that_exits_at_its_import_is_refused(
    directory: Path, here: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    (directory / "mine" / "messages_script.py").write_text("import sys\nsys.exit(0)\n")
    assert here(*SMALL, "model._target_=messages_script.Net") == 2
    error = capsys.readouterr().err
    assert error.startswith("model._target_=messages_script.Net: importing messages_script failed with: ")
    assert "SystemExit: 0 (at " in error and error.endswith("messages_script.py:2)\n")


def test_messages_name_the_task_as_it_was_chosen(here: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert here(*SMALL, "model=toy", "logger=none") == 0
    for args, message in (
        (("task=own",), "task=own needs the run to read; type run=last"),
        (("task=own", "run=last", "profile=true"), "profile=true has no effect on task=own; drop it"),
        (("task=own", "run=last"), "task=own needs at least 3 ranks, and this world has 1; try launcher=spawn"),
    ):
        assert here("--config-dir", "mine", *args) == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize(("mode", "logger", "shown"), [("ddp", "tensorboard", True), ("none", "none", False)])
def test_a_mode_without_an_effect_and_a_dashboard_are_named(
    mode: str, logger: str, shown: bool, here: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert here(*SMALL, "model=toy", f"parallel={mode}", f"logger={logger}") == 0
    output = capsys.readouterr().out
    warning = (
        f"warning: parallel={mode} has one process, so nothing is parallel; to start more, add launcher=spawn "
        "launcher.nproc_per_node=2, or use torchrun --nproc-per-node 2 -m runner\n"
    )
    assert (warning in output) == ("dashboard: tensorboard --logdir" in output) == shown


def test_a_function_may_be_a_loss_or_a_schedule(directory: Path, here: Callable[..., int]) -> None:
    assert here(*SMALL, "model=toy", "loss=mse", "logger=none", "name=module") == 0
    assert here(*SMALL, "model=toy", "loss=squared", "logger=none", "name=function") == 0
    assert result(directory, "function")["weights_sha256"] == result(directory, "module")["weights_sha256"]
    args = ("model=toy", "loss=squared", "loss.factor=2", "scheduler=halved", "scheduler.floor=0.4", "name=halved")
    assert here(*SMALL, *args) == 0
    (path,) = (directory / "outputs" / "halved").iterdir()
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    rates = [line["train/learning_rate"] for line in lines if "train/learning_rate" in line]
    assert rates == pytest.approx([rates[0], rates[0] * 0.5, rates[0] * 0.4])
    first = json.loads(next((directory / "outputs" / "module").glob("*/metrics.jsonl")).read_text().splitlines()[0])
    assert lines[0]["train/loss"] == pytest.approx(2 * first["train/loss"])
