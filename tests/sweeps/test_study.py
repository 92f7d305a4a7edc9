"""hydra/sweeper=optuna: all ranks run the trials of rank 0's study, which continues after an interruption."""

import gc
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from commands import Commands
from custom_files import write_files
from worlds import configure, jobs_of, only_run

from runner.records.ledger import read_ledger
from runner.sweeps.study_options import choose_metric

optuna: Any = pytest.importorskip("optuna", reason="needs the extra optuna")

Here = Callable[..., int]  # the fixture of conftest.py
TOY = ("model=toy", "data=toy", "epochs=1", "backend=gloo", "logger=none", "threads=1")
STUDY = ("hydra/sweeper=optuna", "hydra.sweeper.sampler.seed=1")
RANDOM = (*STUDY, "hydra/sweeper/sampler=random", "optimizer.lr=interval(0.01,0.1)")
# Counts its training steps by rank, and fails if it is too narrow.
MODULE = """\
import os

from runner.shipped.models.toy import Toy


class Counted(Toy):
    def __init__(self, sample_shape, num_outputs, hidden=4):
        super().__init__(sample_shape, num_outputs, hidden)
        self.fails = hidden == 1

    def forward(self, samples):
        if self.training and len(samples) > 3:  # not in a dry run
            with open(f"rank-{os.environ.get('RANK', '0')}", "a") as file:
                file.write("step\\n")
            if self.fails:
                raise ArithmeticError("too narrow")
        return super().forward(samples)
"""
OPTIONS = "_target_: counted.Counted\nsample_shape: ${data.sample_shape}\nnum_outputs: ${data.num_outputs}\nhidden: 4\n"


def open_study(directory: Path) -> Any:
    journal = optuna.storages.journal.JournalFileBackend(str(only_run(directory).path / "study.journal"))
    return optuna.load_study(study_name=only_run(directory).path.name, storage=optuna.storages.JournalStorage(journal))


def write_model(directory: Path, epochs: int = 1) -> tuple[str, ...]:
    write_files(directory / "mine", {"counted.py": MODULE, "model/counted.yaml": OPTIONS})
    return ("--config-dir", "mine", "data=toy", f"epochs={epochs}", *TOY[3:], "model=counted")


@pytest.mark.thorough
def test_ranks_run_the_same_trials_and_prune_at_the_same_step(commands: Commands, tmp_path: Path) -> None:
    arguments = ("-m", *write_model(tmp_path, epochs=3), "parallel=ddp", *STUDY, "hydra/sweeper/pruner=median")
    pruner = ("hydra.sweeper.pruner.n_startup_trials=2", "hydra.sweeper.n_trials=8")
    done = commands.forked_world(2, *arguments, *pruner, "optimizer.lr=tag(log,interval(0.0001,0.3))")
    assert [each.returncode for each in done] == [0, 0], done[0].stdout + done[0].stderr
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


@pytest.mark.thorough
def test_a_failed_trial_is_the_last_one_if_it_stops_the_sweep(here: Here, tmp_path: Path) -> None:
    keys = ("model.hidden=range(1,4)", "hydra.sweeper.n_trials=20", "sweep.stop_on_failure=true")
    assert here("-m", *write_model(tmp_path), *STUDY, *keys) == 1
    states = [job.state for job in jobs_of(tmp_path)]
    assert states == ["finished"] * (len(states) - 1) + ["failed"] and len(states) < 20


@pytest.mark.thorough
def test_a_resumed_study_repeats_interrupted_trials_but_not_failed_ones(here: Here, tmp_path: Path) -> None:
    keys = ("optimizer.lr=range(0.1,0.4,0.1)", "model.hidden=range(1,4)", "batch_size=choice(32,64)")
    assert here("-m", *write_model(tmp_path), *STUDY, *keys, "hydra.sweeper.n_trials=5") == 1
    before = jobs_of(tmp_path)
    assert {job.state for job in before} == {"finished", "failed"}
    # As if the sweep had been killed in its last job.
    ledger = only_run(tmp_path).path / "ledger.jsonl"
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


@pytest.mark.thorough
def test_a_resumed_study_keeps_its_storage_and_direction_and_proposes_new_trials(
    here: Here, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert here("-m", *TOY, *RANDOM, "hydra.sweeper.n_trials=2") == 0
    capfd.readouterr()
    before = sorted(tmp_path.rglob("*"))
    assert here("-m", "resume=last", "hydra.sweeper.direction=maximize") == 2
    sweep = only_run(tmp_path).path
    error = f"hydra.sweeper.direction=maximize: the direction of study {sweep.name} is minimize"
    assert error in capfd.readouterr().err
    assert sorted(tmp_path.rglob("*")) == before
    assert here("-m", "resume=last", "hydra.sweeper.storage=sqlite:///other.db", "hydra.sweeper.n_trials=3") == 2
    error = f"hydra.sweeper.storage=sqlite:///other.db: the study {sweep.name} lacks trials of {sweep}"
    assert error in capfd.readouterr().err
    assert len(jobs_of(tmp_path)) == 2

    assert here("-m", "resume=last", "hydra.sweeper.n_trials=4") == 0
    proposed = [job.overrides[-1] for job in jobs_of(tmp_path)]
    assert len(proposed) == len(set(proposed)) == 4
    assert here("-m", *TOY, *RANDOM, "hydra.sweeper.n_trials=4", "hydra.sweeper.n_jobs=4", "name=whole") == 0
    assert [job.overrides[-1] for job in read_ledger(only_run(tmp_path, "whole").path)] == proposed


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:unclosed database:ResourceWarning")  # Optuna's own, which Python 3.13 reports
def test_sweeps_share_a_study_in_a_database(here: Here, tmp_path: Path) -> None:
    arguments = ("-m", *TOY, *STUDY, "hydra.sweeper.n_trials=1", "hydra.sweeper.study_name=both")
    arguments += ("hydra.sweeper.storage=sqlite:///study.db", "optimizer.lr=interval(0.01,0.1)")
    assert here(*arguments) == here(*arguments, "seed=1") == 0
    study = optuna.load_study(study_name="both", storage=f"sqlite:///{tmp_path}/study.db")
    assert [trial.state.name for trial in study.trials] == ["COMPLETE"] * 2
    pausing = ("seed=2", "hydra/sweeper/pruner=asha", "hydra.sweeper.pruner.min_resource=4", "eval_every_steps=4")
    assert here(*arguments, *pausing) == 0
    assert [*study.trials[2].intermediate_values] == [4] and study.trials[2].state.name == "RUNNING"
    del study
    gc.collect()


@pytest.mark.thorough
def test_a_study_stops_after_its_first_job_without_the_metric(
    here: Here, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    accuracy = ("hydra.sweeper.metric=val/accuracy", "hydra.sweeper.direction=minimize", "hydra.sweeper.n_trials=3")
    assert here("-m", *TOY, *STUDY, *accuracy, "optimizer.lr=interval(0.01,0.1)") == 2
    error = "hydra.sweeper.metric=val/accuracy: 0-lr-0.04753 has finished without this metric; set one that it has: "
    assert capfd.readouterr().err.endswith(f"{error}train/loss, val/loss\n")
    assert [job.state for job in jobs_of(tmp_path)] == ["finished"]
    assert here("-m", "resume=last", "hydra.sweeper.metric=val/loss") == 0  # which its first job has
    assert [trial.state.name for trial in open_study(tmp_path).trials] == ["COMPLETE"] * 3


@pytest.mark.parametrize(
    ("overrides", "given", "metric", "direction"),
    [
        ([], (None, None), "val/loss", "minimize"),
        (["metrics=[r2,mae]", "monitor=val/mae"], (None, None), "val/mae", "minimize"),
        (["metrics=mae", "monitor=val/mae", "monitor_direction=max"], (None, None), "val/mae", "maximize"),
        (["metrics=r2"], ("train/loss", None), "train/loss", "minimize"),
        ([], ("val/loss", "maximize"), "val/loss", "maximize"),
    ],
)
def test_a_study_optimizes_the_monitor_by_default(
    overrides: list[str], given: tuple[str | None, str | None], metric: str, direction: str
) -> None:
    assert choose_metric(*given, configure(*TOY, *overrides)[0]) == (metric, direction)


ASHA = "seed=range(3) hydra/sweeper/pruner=asha"
OFTEN = f"{ASHA} eval_every_steps=8"
INVALID = {
    "seed=0": "hydra/sweeper=optuna has nothing to vary",
    "seed=range(3) hydra.sweeper.metric=val/acuracy": "did you mean val/accuracy?",
    "seed=range(3) hydra.sweeper.direction=up": "hydra.sweeper.direction=up must be minimize or maximize",
    "seed=range(3) hydra.sweeper.n_trials=0": "hydra.sweeper.n_trials=0 must be an integer of at least 1",
    "seed=range(3) hydra.sweeper.storage=sqlite:////no/such/folder/study.db": "hydra.sweeper.storage=sqlite:////no/",
    "seed=range(3) hydra.sweeper.sampler._target_=optuna.Nothing": "hydra.sweeper.sampler: ",
    "optimizer.lr=tag(log,interval(0,1))": "optimizer.lr=tag(log,interval(0,1)): ",
    f"{OFTEN} hydra.sweeper.pruner.min_resource=0": "pruner.min_resource=0 must be an integer of at least 1",
    f"{OFTEN} hydra.sweeper.pruner.reduction_factor=1": ".reduction_factor=1 must be an integer of at least 2",
    f"{OFTEN} hydra.sweeper.metric=train/loss": "hydra.sweeper.metric=train/loss: hydra/sweeper/pruner=asha",
    ASHA: "eval_every_steps=null: hydra/sweeper/pruner=asha pauses trials at evaluations before the end of a run",
    f"{ASHA} max_steps=8 eval_every_steps=8": "epochs=1 and max_steps=8 there is none; set a smaller eval_every_steps",
    f"{ASHA} max_steps=8 eval_every_steps=4 hydra.sweeper.pruner.min_resource=8": "must be below max_steps=8",
    f"{ASHA} max_steps=8 eval_every_steps=5 hydra.sweeper.pruner.min_resource=6": "the last one is after step 5; set",
}


def test_invalid_options_are_refused(
    here: Here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for line, message in INVALID.items():
        assert here("-m", *TOY, "hydra/sweeper=optuna", *line.split()) == 2
        error = capfd.readouterr().err
        assert message in error and error.count("\n") <= 3
    monkeypatch.setattr("runner.errors.find_spec", lambda name: None)
    assert here("-m", *TOY, "hydra/sweeper=optuna", "seed=range(3)") == 2
    assert "pip install 'experiment-runner[optuna]'" in capfd.readouterr().err
    assert list(tmp_path.glob("outputs/run/*")) == []
