"""The groups of metrics and the monitor in whole runs: in every mode the same numbers, chosen, recorded, refused."""

import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
from mode_cases import tier
from worlds import run

from runner.records.compared_runs import read_jobs
from runner.records.run_record import SPEEDS

pytestmark = pytest.mark.skipif(find_spec("torchmetrics") is None, reason="needs the extra metrics")

Here = Callable[..., int]  # the fixture of conftest.py
DIGITS = ("model=mlp", "data=digits", "precision=fp64", "max_steps=3", "batch_size=50", "logger=none")
TOY = ("model=toy", "data=toy", "max_steps=2", "logger=none", "backend=gloo", "threads=1")
CELLS = (("pipeline", 2), ("tp", 2), ("fsdp", 2), ("ps", 3), ("ddp", 3))

MODULE = """\
from dataclasses import dataclass

import torch

from runner import Rows


class Worst:
    higher_is_better = None

    def update(self, outputs, targets):
        return Rows((outputs - targets).abs().amax(-1))

    def compute(self, rows):
        return rows.max()


class Bias:
    higher_is_better = False

    def __init__(self, power: int = 1):
        if power < 1:
            raise ValueError(f"power={power} must be at least 1")
        self.power = power

    def update(self, outputs, targets):
        return {"sum": ((outputs - targets) ** self.power).sum(), "count": torch.tensor(outputs.numel())}

    def compute(self, sums):
        return sums["sum"] / sums["count"]


class Broken(Bias):
    def update(self, outputs, targets):
        return outputs - targets[:, :3]


class NoMetric:
    def update(self, outputs, targets): ...
"""
FILES = {
    "measuring.py": MODULE,
    "metrics/bias.yaml": "bias: {_target_: measuring.Bias, power: 1}\n",
    "metrics/worst.yaml": "worst: {_target_: measuring.Worst}\n",
    "metrics/broken.yaml": "broken: {_target_: measuring.Broken}\n",
    "metrics/no_metric.yaml": "it: {_target_: measuring.NoMetric}\n",
    "metrics/nameless.yaml": "_target_: measuring.Bias\n",
    "metrics/loss.yaml": "loss: {_target_: measuring.Bias}\n",
    "levels.py": (
        "import torch, torchmetrics\n\n\n"
        "class Level(torchmetrics.Metric):\n"
        "    higher_is_better = True\n\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.add_state('level', torch.tensor(0.0), dist_reduce_fx='mean')\n\n"
        "    def update(self, preds, target): ...\n\n"
        "    def compute(self): ...\n"
    ),
    "metrics/level.yaml": "level: {_target_: levels.Level}\n",
    "metrics/auroc.yaml": "auroc: {_target_: torchmetrics.AUROC, task: multiclass, num_classes: 10}\n",
}


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in FILES.items():
        path = tmp_path / "mine" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path / "mine")])
    monkeypatch.delitem(sys.modules, "measuring", raising=False)
    return tmp_path


@pytest.mark.parametrize(
    ("mode", "world_size"),
    [pytest.param(*cell, marks=tier(cell[0] == "pipeline", cell[0] != "ddp")) for cell in CELLS],
)
def test_metrics_of_every_mode_equal_those_of_one_process(mode: str, world_size: int, mine: Path) -> None:
    search = f"hydra.searchpath=['file://{mine}/mine']"
    words = (*DIGITS, search, "metrics=[accuracy,f1,perplexity,top_k,auroc]", "metrics.f1.per_class=true")
    alone = run(mine / "none", 1, *words).result
    spread = run(mine / mode, world_size, *words, f"parallel={mode}").result
    assert {"val/accuracy", "val/f1/class_9", "val/perplexity", "val/top_k", "val/auroc"} <= alone["metrics"].keys()
    assert spread["metrics"] == pytest.approx(alone["metrics"], rel=1e-9)
    assert spread["monitor"] == alone["monitor"] == {"name": "val/accuracy", "direction": "max"}
    maximized = dict.fromkeys(("accuracy", "f1", "top_k", "auroc"), "max")
    assert spread["directions"] == alone["directions"] == {**maximized, "perplexity": "min", "loss": "min"}


@pytest.mark.parametrize(
    ("words", "metrics", "monitor"),
    [
        ([], set(), ("val/loss", "min")),
        (["metrics=[r2,mae]", "monitor=val/mae"], {"val/r2", "val/mae"}, ("val/mae", "min")),
        (["metrics=[worst,bias]"], {"val/worst", "val/bias"}, ("val/bias", "min")),
        (["metrics=worst", "monitor=val/worst", "monitor_direction=max"], {"val/worst"}, ("val/worst", "max")),
        (["+metrics.mine._target_=measuring.Bias"], {"val/mine"}, ("val/mine", "min")),
    ],
    ids=lambda given: " ".join(given) if isinstance(given, list) else "",
)
def test_selected_metrics_are_recorded(
    words: list[str], metrics: set[str], monitor: tuple[str, str], mine: Path, here: Here
) -> None:
    assert here("--config-dir", "mine", *TOY, *words) == 0
    (made,) = (mine / "outputs" / "run").iterdir()
    (job,) = read_jobs(made, "run")
    assert job.measured.keys() - {*SPEEDS} == {"train/loss", "val/loss", *metrics}
    assert job.measured_monitor is not None
    assert (job.measured_monitor.name, job.measured_monitor.direction) == monitor


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["metrics=[mae,acuracy]"], "metrics=[mae,acuracy]: no such metrics; did you mean accuracy? ("),
        (["metrics=bias", "metrics.bias.power=0"], "metrics.bias.power=0 must be at least 1\n"),
        (["metrics=nameless"], "metrics._target_=measuring.Bias: a metric has a name; in its file write NAME: {_targ"),
        (["metrics=loss"], "metrics.loss: every evaluation logs val/loss; give the metric another name\n"),
        (["metrics=no_metric"], "metrics.it._target_=measuring.NoMetric: the class lacks higher_is_better, compute,"),
        (["metrics=broken"], "fails for one sample with: RuntimeError: The size of tensor a (5) must match"),
        (
            ["metrics=level"],
            "metrics.level._target_=levels.Level: its state level with dist_reduce_fx=",
        ),
        (
            ["metrics=mae", "monitor=val/acuracy"],
            "monitor=val/acuracy: no metric returns it; choose among: val/mae, val/l",
        ),
        (
            ["metrics=worst", "monitor=val/worst"],
            "monitor=val/worst: its metric does not declare whether a higher value is better; set",
        ),
    ],
    ids=lambda given: " ".join(given) if isinstance(given, list) else "",
)
def test_errors_have_one_line(
    words: list[str], message: str, mine: Path, here: Here, capfd: pytest.CaptureFixture[str]
) -> None:
    assert here("--config-dir", "mine", *TOY, *words) == 2
    out, said = capfd.readouterr()
    assert out == "" and message in said and said.count("\n") == 1
    assert sorted(path.name for path in mine.iterdir()) == ["mine"]


def test_torchmetrics_that_is_not_installed_is_named(
    here: Here, mine: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "torchmetrics", None)
    assert here("--config-dir", "mine", *TOY, "metrics=auroc") == 2
    assert "torchmetrics is not installed; pip install 'experiment-runner[metrics]'" in capfd.readouterr().err


def test_a_sweep_whose_jobs_have_different_monitors_is_compared_by_the_loss(
    mine: Path, here: Here, capfd: pytest.CaptureFixture[str]
) -> None:
    assert here("--config-dir", "mine", "-m", *TOY, "metrics=mae,r2") == 0
    said = capfd.readouterr().out
    table = next(line for line in said.splitlines() if line.startswith("job  "))
    assert table.split() == ["job", "state", "val/loss", "val/mae", "val/r2", "why"]
    assert "best metrics=" in said and ": val/loss " in said.partition("best metrics=")[2].splitlines()[0]
