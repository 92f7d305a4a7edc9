"""parallel=auto: the modes that fit are measured, the fastest trains, and the run records it."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from commands import Commands
from parity import COMMON, EXPERIMENTS, assert_equal
from worlds import Run, jobs_of, only_run, run

from runner.records.finding import CELLS

TOY = (*EXPERIMENTS["toy"], *COMMON)


def choice_of(done: Run) -> dict[str, Any]:
    return json.loads((done.path / "auto.json").read_text())


@pytest.fixture
def few_modes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plan three modes, because tests/planning plans all of them."""
    monkeypatch.setattr("runner.jobs.mode_choice.modes_to_compare", lambda chosen: ["fsdp", "local_sgd", "zero"])


@pytest.mark.cpu("measures the operators of the CPU")
@pytest.mark.usefixtures("few_modes")
def test_the_fastest_of_the_best_modes_trains_and_is_recorded(tmp_path: Path) -> None:
    done = run(tmp_path, 2, *TOY, "parallel=auto", "parallel.candidates=2", "checkpoint.every_steps=4")
    choice = choice_of(done)
    rates, mode = choice["samples_per_second"], choice["mode"]
    assert len(rates) == 2 and mode == max(rates, key=lambda name: rates[name])
    assert (choice["world_size"], choice["failed"], choice["jobs"]) == (2, {}, 5)
    assert {path.name for path in (done.path / CELLS).iterdir()} == set(rates)
    assert done.result["parallel"] == mode
    assert_equal(done, run(tmp_path / "given", 2, *TOY, f"parallel={mode}"))
    overrides = yaml.safe_load((done.path / "overrides.yaml").read_text())
    assert [each for each in overrides if each.startswith("parallel")] == [f"parallel={mode}"]
    log = (done.path / "log.txt").read_text()
    assert log.count("measuring ") == 1 and "auto     measured, in samples/s: " in log
    # The recorded mode is used again, also if the command that is repeated says auto.
    other = next(name for name in rates if name != mode)
    (done.path / "auto.json").write_text(json.dumps(choice | {"mode": other}))
    resumed = run(tmp_path, 2, f"resume={done.path}", "parallel=auto", "max_steps=12")
    assert resumed.result["parallel"] == other and resumed.result["step"] == 12
    assert (done.path / "log.txt").read_text().count("measuring ") == 1


def test_a_mode_that_fails_is_not_chosen(
    here: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runner.jobs.mode_choice.modes_to_compare", lambda chosen: ["broken", "none", "local_sgd"])
    (tmp_path / "mine" / "parallel").mkdir(parents=True)
    (tmp_path / "mine" / "parallel" / "broken.yaml").write_text("_target_: broken.Broken\n")
    (tmp_path / "mine" / "broken.py").write_text(
        "from runner.parallel.none import NoParallel\n\n\nclass Broken(NoParallel):\n"
        "    def prepare(self, recipe, world):\n"
        "        if world.rank_info.source != 'a plan':\n"
        "            raise RuntimeError('on purpose')\n"
        "        return super().prepare(recipe, world)\n"
    )
    assert here("--config-dir=mine", *TOY, "parallel=auto", "parallel.candidates=99") == 0
    choice = choice_of(only_run(tmp_path))
    assert choice["failed"] == {"broken": "RuntimeError: on purpose"}
    assert choice["mode"] == "none" and set(choice["samples_per_second"]) == {"none"}  # local_sgd has other numbers


def test_a_model_that_needs_values_is_measured(
    here: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runner.jobs.mode_choice.modes_to_compare", lambda chosen: ["local_sgd", "none"])
    (tmp_path / "mine" / "model").mkdir(parents=True)
    (tmp_path / "mine" / "model" / "reading.yaml").write_text("_target_: reading.Reading\n")
    (tmp_path / "mine" / "reading.py").write_text(
        "from torch import nn\n\n\nclass Reading(nn.Linear):\n"
        "    def __init__(self):\n        super().__init__(64, 10)\n\n"
        "    def forward(self, x):\n        y = super().forward(x.flatten(1))\n        return y / y.norm().item()\n"
    )
    words = ("model=reading", "data.sample_shape=[1,8,8]", "max_steps=2", "logger=none")
    assert here("--config-dir=mine", *words, "parallel=auto") == 0
    assert set(choice_of(only_run(tmp_path))["samples_per_second"]) == {"none"}  # local_sgd has other numbers


@pytest.mark.usefixtures("few_modes")
def test_a_model_that_does_not_fit_is_refused_with_its_need(
    here: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    large = ("model=mlp", "model.hidden=[256,256,256,256,256,256]", "data.sample_shape=[1,8,8]", "parallel=auto")
    message = (
        r"does not fit into 0.0035 GiB per rank on 1 rank: the smallest need is 0.00\d+ GiB, of parallel=\w+; "
        r"parallel=\w+ fits on 2 ranks"
    )
    assert here(*large, "parallel.memory_gib=0.0035", "batch_size=16") == 2
    assert re.search(message, capsys.readouterr().err)
    assert not Path("outputs").exists()


@pytest.mark.cpu("measures the operators of the CPU")
@pytest.mark.usefixtures("few_modes")
def test_micro_batches_come_from_the_plan(tmp_path: Path) -> None:
    words = ("model=mlp", "model.hidden=[64]", "data.sample_shape=[1,8,8]", "batch_size=1024", *COMMON)
    done = run(tmp_path, 1, *words, "parallel=auto", "micro_batches=auto", "parallel.memory_gib=0.0008")
    cells = [*(done.path / CELLS).glob("*/config.yaml")]
    assert {yaml.safe_load(cell.read_text())["micro_batches"] for cell in cells} <= {8, 16, 32}
    assert cells
    assert "out of memory" not in (done.path / "log.txt").read_text()


def test_what_it_cannot_choose_for_is_refused(here: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    for words, message in {
        ("task=measure",): "parallel=auto has no effect on task=measure",
        ("parallel.candidates=0",): "parallel.candidates=0 must be at least 1",
        ("parallel.device=h101",): "device=h101: no such data sheet; did you mean h100",
    }.items():
        assert here(*TOY, "parallel=auto", *words) == 2
        assert message in capsys.readouterr().err
    assert not Path("outputs").exists()


@pytest.mark.parametrize("auto", ["parallel=auto", "micro_batches=auto"])
def test_wrong_input_is_refused_as_without_auto_before_anything_is_planned(
    auto: str, here: Callable[..., int], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def plan(*_: Any, **options: Any) -> None:
        raise AssertionError("planned")

    monkeypatch.setattr("runner.jobs.mode_choice.compose_modes", plan)
    monkeypatch.setattr("runner.jobs.fit.plan_modes", plan)
    torch.save({"weight": torch.zeros(3)}, "weights.pt")
    Path("mine/callbacks").mkdir(parents=True)
    Path("mine/picky.py").write_text(
        "from runner import Callback\n\n\nclass Picky(Callback):\n    def __init__(self, rate: float = 0.0):\n"
        "        raise ValueError(f'rate={rate} must be positive; try 0.1')\n"
    )
    Path("mine/callbacks/picky.yaml").write_text("picky: {_target_: picky.Picky, rate: 0.0}\n")
    wrong = [
        ["init_from.path=weights.pt"],
        ["loss=mse"],
        ["data=arrays"],
        ["freeze=[nothing]"],
        ["optimizer.groups=[{match: nothing, lr: 0.1}]"],
        ["metrics=mae"],
        ["callbacks=[picky]"],
        ["monitor=val/nothing"],
        ["precision=fp16"],
    ]
    for words in wrong:
        assert here("--config-dir=mine", *words) == 2
        expected = capsys.readouterr().err
        assert here("--config-dir=mine", *words, auto) == 2
        assert capsys.readouterr() == ("", expected)
    assert not Path("outputs").exists()


KILLER = """\
import os
import signal

from runner import Callback


class Killer(Callback):
    def after_step(self, now):
        if now.step == 7 and os.environ["RANK"] == "1" and not os.path.exists("killed"):
            open("killed", "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.thorough
def test_each_job_of_a_sweep_chooses_and_a_restarted_one_keeps_its_mode(commands: Commands) -> None:
    mine = commands.folder / "mine"
    (mine / "callbacks").mkdir(parents=True)
    (mine / "killer.py").write_text(KILLER)
    (mine / "callbacks" / "killer.yaml").write_text("killer: {_target_: killer.Killer}\n")
    words = ("--config-dir=mine", *TOY, "parallel=auto", "parallel.candidates=2", "callbacks=[killer]")
    launcher = ("launcher=spawn", "launcher.nproc_per_node=2", "launcher.max_restarts=1")
    saving = ("checkpoint.every_steps=4", "checkpoint.asynchronous=false")  # step 4 is saved before step 7
    done = commands.forked(*words, *launcher, *saving, "seed=1,2", "-m")
    assert done.returncode == 0, done.stderr
    jobs = jobs_of(commands.folder)
    assert [len(choice_of(Run(job.directory))["samples_per_second"]) for job in jobs] == [2, 2]
    logs = [(job.directory / "log.txt").read_text() for job in jobs]
    assert [log.count("measuring ") for log in logs] == [1, 1]
    assert [log.count("resuming after step 4") for log in logs] == [1, 0]
