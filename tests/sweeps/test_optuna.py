"""hydra/sweeper=optuna: every rank runs rank 0's trial and stops where rank 0 does; a study goes on after a stop."""

import gc
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from commands import Commands

from runner.runs.ledger import JobRecord, read_ledger

optuna: Any = pytest.importorskip("optuna", reason="needs the extra optuna")

Here = Callable[..., int]  # the fixture of conftest.py
TOY = ("model=toy", "data=toy", "epochs=3", "backend=gloo", "logger=none", "threads=1")
STUDY = ("hydra/sweeper=optuna", "hydra.sweeper.sampler.seed=1")
# Says on which rank and how often it was trained, and breaks when it is too narrow.
MODULE = """\
import os

from models.toy import Toy


class Told(Toy):
    def __init__(self, sample_shape, num_outputs, hidden=4):
        super().__init__(sample_shape, num_outputs, hidden)
        self.broken = hidden == 1

    def forward(self, samples):
        if self.training:
            with open(f"rank-{os.environ.get('RANK', '0')}", "a") as file:
                file.write("step\\n")
            if self.broken:
                raise ArithmeticError("too narrow")
        return super().forward(samples)
"""
OPTIONS = "_target_: told.Told\nsample_shape: ${data.sample_shape}\nnum_outputs: ${data.num_outputs}\nhidden: 4\n"


def sweep_of(folder: Path) -> Path:
    (sweep,) = (folder / "outputs" / "run").iterdir()
    return sweep


def jobs_of(folder: Path) -> list[JobRecord]:
    return read_ledger(sweep_of(folder))


def open_study(folder: Path) -> Any:
    journal = optuna.storages.journal.JournalFileBackend(str(sweep_of(folder) / "study.journal"))
    return optuna.load_study(study_name=sweep_of(folder).name, storage=optuna.storages.JournalStorage(journal))


def write_model(folder: Path) -> tuple[str, ...]:
    (folder / "own" / "model").mkdir(parents=True)
    (folder / "own" / "told.py").write_text(MODULE)
    (folder / "own" / "model" / "told.yaml").write_text(OPTIONS)
    return ("--config-dir", "own", *TOY[1:], "model=told")


@pytest.mark.thorough
def test_ranks_run_the_same_trials_and_prune_at_the_same_step(commands: Commands, tmp_path: Path) -> None:
    words = ("-m", *write_model(tmp_path), "parallel=ddp", *STUDY, "hydra/sweeper/pruner=median")
    pruner = ("hydra.sweeper.pruner.n_startup_trials=2", "hydra.sweeper.n_trials=8")
    done = commands.torchrun(2, *words, *pruner, "optimizer.lr=tag(log,interval(0.0001,0.3))")
    assert done.returncode == 0, done.stdout + done.stderr
    jobs, trials = jobs_of(tmp_path), open_study(tmp_path).trials
    assert [job.trial for job in jobs] == [trial.number for trial in trials] == list(range(8))
    assert {job.state for job in jobs} == {"finished", "pruned"}
    num_steps = 0
    for job, trial in zip(jobs, trials, strict=True):
        result = json.loads((job.directory / "result.json").read_text())
        assert trial.state.name == {"finished": "COMPLETE", "pruned": "PRUNED"}[job.state]
        assert result["state"] == job.state and max(trial.intermediate_values) in (16, 32)
        assert f"optimizer.lr={trial.params['optimizer.lr']}" in job.overrides
        assert result["step"] == (48 if job.state == "finished" else max(trial.intermediate_values))
        if job.state == "finished":
            assert trial.value == job.metrics["val/loss"]
        num_steps += result["step"]
    assert [(tmp_path / f"rank-{rank}").read_text().count("step") for rank in (0, 1)] == [num_steps] * 2


def test_a_study_goes_on_and_keeps_what_failed(here: Here, tmp_path: Path) -> None:
    kinds = ("optimizer.lr=range(0.1,0.4,0.1)", "model.hidden=range(1,4)", "batch_size=choice(32,64)")
    assert here("-m", *write_model(tmp_path), *STUDY, *kinds, "hydra.sweeper.n_trials=5") == 1
    before = jobs_of(tmp_path)
    assert {job.state for job in before} == {"finished", "failed"}
    # As if it had been killed in its last job.
    ledger = sweep_of(tmp_path) / "ledger.jsonl"
    ledger.write_text("".join(ledger.read_text().splitlines(keepends=True)[:-1]))
    result = before[-1].directory / "result.json"
    result.write_text(json.dumps(json.loads(result.read_text()) | {"state": "running"}))

    assert here("-m", "resume=last", "hydra.sweeper.n_trials=7") == 1
    after = jobs_of(tmp_path)
    assert [job.trial for job in after] == list(range(7))
    assert [job.num_starts for job in after] == [1, 1, 1, 1, 2, 1, 1]
    for job, trial in zip(after, open_study(tmp_path).trials, strict=True):
        hidden, lr = trial.params["model.hidden"], trial.params["optimizer.lr"]
        assert hidden in (1, 2, 3) and lr == pytest.approx(round(lr, 1)) and lr < 0.35
        assert (job.state, trial.state.name) == (("failed", "FAIL") if hidden == 1 else ("finished", "COMPLETE"))


def test_a_seeded_study_that_goes_on_proposes_other_trials(here: Here, tmp_path: Path) -> None:
    seeded = ("hydra/sweeper/sampler=random", "optimizer.lr=interval(0.01,0.1)")  # the seed is in STUDY
    assert here("-m", *TOY, *STUDY, *seeded, "hydra.sweeper.n_trials=2") == 0
    assert here("-m", "resume=last", "hydra.sweeper.n_trials=4") == 0
    proposed = [trial.params["optimizer.lr"] for trial in open_study(tmp_path).trials]
    assert len(proposed) == len(set(proposed)) == 4


def test_a_sweep_does_not_go_on_with_another_study(
    here: Here, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert here("-m", *TOY, *STUDY, "optimizer.lr=interval(0.01,0.1)", "hydra.sweeper.n_trials=2") == 0
    assert here("-m", "resume=last", "hydra.sweeper.storage=sqlite:///other.db", "hydra.sweeper.n_trials=3") == 2
    said = capfd.readouterr().err
    assert "hydra.sweeper.storage=sqlite:///other.db: the study" in said and "has not the trials of" in said
    assert len(jobs_of(tmp_path)) == 2


@pytest.mark.filterwarnings("ignore:unclosed database:ResourceWarning")  # Python 3.13 minds Optuna's, left for the end
def test_sweeps_share_a_study_in_a_database(here: Here, tmp_path: Path) -> None:
    words = ("-m", *TOY, *STUDY, "hydra.sweeper.n_trials=2", "hydra.sweeper.study_name=both")
    words += ("hydra.sweeper.storage=sqlite:///study.db", "optimizer.lr=interval(0.01,0.1)")
    assert here(*words) == here(*words, "seed=1") == 0
    study = optuna.load_study(study_name="both", storage=f"sqlite:///{tmp_path}/study.db")
    assert [trial.state.name for trial in study.trials] == ["COMPLETE"] * 4
    del study
    gc.collect()


def test_a_study_is_of_one_direction(here: Here, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = ("-m", *TOY, *STUDY, "hydra.sweeper.n_trials=1", "optimizer.lr=interval(0.01,0.1)")
    shared = ("hydra.sweeper.study_name=both", "hydra.sweeper.storage=study.journal")
    assert here(*words, *shared) == here(*words, "name=own") == 0
    before = sorted(tmp_path.rglob("*"))
    assert here(*words, *shared, "hydra.sweeper.direction=maximize") == 2
    assert here("-m", "name=own", "resume=last", "hydra.sweeper.direction=maximize") == 2
    said = capfd.readouterr().err
    assert said.count("hydra.sweeper.direction=maximize: the study ") == said.count(" is to minimize; keep that") == 2
    assert sorted(tmp_path.rglob("*")) == before


def test_a_metric_that_no_job_has_ends_the_study_at_its_first(
    here: Here, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    accuracy = ("hydra.sweeper.metric=val/accuracy", "hydra.sweeper.direction=minimize", "hydra.sweeper.n_trials=3")
    accuracy += ("optimizer.lr=interval(0.01,0.1)",)
    assert here("-m", *TOY, *STUDY, *accuracy) == 2
    why = (
        "hydra.sweeper.metric=val/accuracy: 0-lr-0.04753 has finished without it, so that there is nothing to optimize"
    )
    assert capfd.readouterr().err.endswith(f"{why}; type one that it has: train/loss, val/loss\n")
    assert [job.state for job in jobs_of(tmp_path)] == ["finished"]
    assert here("-m", "resume=last", "hydra.sweeper.metric=val/loss") == 0  # which its first job has
    assert [trial.state.name for trial in open_study(tmp_path).trials] == ["COMPLETE"] * 3


@pytest.mark.parametrize(
    ("words", "metric", "direction"),
    [
        ([], "val/loss", "MINIMIZE"),
        (["metrics=r2"], "val/r2", "MAXIMIZE"),
        (["metrics=[r2,mae]", "monitor=val/mae"], "val/mae", "MINIMIZE"),
        (["metrics=mae", "monitor=val/mae", "monitor_direction=max"], "val/mae", "MAXIMIZE"),
        (["metrics=r2", "hydra.sweeper.metric=train/loss"], "train/loss", "MINIMIZE"),
        (["hydra.sweeper.metric=val/loss", "hydra.sweeper.direction=maximize"], "val/loss", "MAXIMIZE"),
    ],
    ids=lambda given: " ".join(given) if isinstance(given, list) else "",
)
def test_a_study_optimizes_what_is_monitored_unless_told_otherwise(
    words: list[str], metric: str, direction: str, here: Here, tmp_path: Path
) -> None:
    assert here("-m", *TOY, *STUDY, *words, "optimizer.lr=interval(0.01,0.1)", "hydra.sweeper.n_trials=2") == 0
    study = open_study(tmp_path)
    assert study.direction.name == direction
    assert [trial.value for trial in study.trials] == [job.metrics[metric] for job in jobs_of(tmp_path)]


WRONG = {
    "seed=0": "hydra/sweeper=optuna has nothing to vary",
    "seed=range(3) hydra.sweeper.metric=val/acuracy": "no such metric; did you mean val/accuracy?",
    "seed=range(3) monitor=val/los": "monitor=val/los: no such metric; did you mean val/loss?",
    "seed=range(3) metrics=mae monitor=val/r2": "monitor=val/r2: no such metric",
    "seed=range(3) +metrics.own._target_=no.such hydra.sweeper.metric=val/own": "metrics.own._target_=no.such: ",
    "seed=range(3) hydra.sweeper.direction=up": "hydra.sweeper.direction=up must be minimize or maximize",
    "seed=range(3) hydra.sweeper.n_trials=0": "hydra.sweeper.n_trials=0 must be an integer of at least 1",
    "seed=range(3) hydra.sweeper.storage=sqlite:////no/such/folder/study.db": "hydra.sweeper.storage=sqlite:////no/",
    "seed=range(3) hydra.sweeper.sampler._target_=optuna.Nothing": "hydra.sweeper.sampler: ",
    "optimizer.lr=tag(log,interval(0,1))": "optimizer.lr=tag(log,interval(0,1)): ",
    "optimizer.lrr=interval(0.1,1)": "optimizer.lrr=",
}


@pytest.mark.parametrize("line", WRONG)
def test_wrong_options_are_told(line: str, here: Here, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert here("-m", *TOY, "hydra/sweeper=optuna", *line.split()) == 2
    said = capfd.readouterr().err
    assert WRONG[line] in said and said.count("\n") <= 3
    assert list(tmp_path.iterdir()) == []


def test_what_is_not_installed_is_named(
    here: Here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    assert here("-m", *TOY, "hydra/sweeper=optuna", "seed=range(3)") == 2
    assert "pip install 'experiment-runner[optuna]'" in capfd.readouterr().err
    assert list(tmp_path.iterdir()) == []
