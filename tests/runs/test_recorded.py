"""Run directories and sweeps that an older version wrote, when classes had other paths, go on being read."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

RECORDED = Path(__file__).parent / "recorded"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A finished run of 16 steps, with its last checkpoint."""
    return Path(shutil.copytree(RECORDED / "run", tmp_path / "outputs" / "older" / "20261121-194459"))


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    """A sweep of four jobs, the last of which was never started."""
    return Path(shutil.copytree(RECORDED / "sweep", tmp_path / "outputs" / "older" / "sweep-20261121-194505"))


def result_of(path: Path) -> dict[str, object]:
    return json.loads((path / "result.json").read_text())


def test_they_name_classes_by_paths_that_are_no_more() -> None:
    paths = [RECORDED / "run" / "config.yaml", RECORDED / "sweep" / "ledger.jsonl"]
    assert all("runner.loader.Loader" in path.read_text() for path in paths)


def test_a_run_goes_on(run: Path, here: Callable[..., int]) -> None:
    assert here(f"resume={run}", "epochs=3") == 0
    result = result_of(run)
    assert (result["state"], result["step"], result["epoch"]) == ("finished", 24, 3)
    config = yaml.safe_load((run / "config.yaml").read_text())
    assert config["scheduler"]["_target_"] == "runner.training.lr_schedules.Cosine"  # the option that was chosen then


def test_a_run_is_evaluated(run: Path, here: Callable[..., int]) -> None:
    assert here("task=evaluate", f"run={run}") == 0
    (evaluated,) = (path for path in run.parent.iterdir() if path != run)
    assert result_of(evaluated)["metrics"] == pytest.approx({"val/loss": result_of(run)["metrics"]["val/loss"]})  # type: ignore[index]


def test_a_run_is_made_again(run: Path, here: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert here("task=rerun", f"run={run}") == 0
    said = capsys.readouterr().out
    assert f"again   {run}" in said
    assert "_target_" not in said, said  # a class that has moved is no other one


def test_a_run_is_reported(run: Path, here: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert here("task=report", f"run={run}") == 0
    said = capsys.readouterr().out
    assert "0.8343" in said
    assert "python -m runner model=toy data=toy" in said  # its launcher started no processes


def test_a_sweep_goes_on_with_the_job_it_lacks(
    sweep: Path, here: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    before = {job: result_of(sweep / job) for job in ("0-lr-0.1_seed-0", "1-lr-0.1_seed-1", "2-lr-0.01_seed-0")}
    assert here("-m", f"resume={sweep}") == 0
    assert "3 jobs are done, 1 unfinished, 0 new" in capsys.readouterr().out
    assert result_of(sweep / "3-lr-0.01_seed-1")["state"] == "finished"
    assert {job: result_of(sweep / job) for job in before} == before


def test_a_sweep_takes_more_jobs(sweep: Path, here: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert here("-m", f"resume={sweep}", "seed=0,1,2") == 0
    assert "3 jobs are done, 1 unfinished, 2 new" in capsys.readouterr().out


def test_a_sweep_whose_jobs_would_differ_is_refused(
    sweep: Path, here: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert here("-m", f"resume={sweep}", "scheduler=cosine") == 2
    assert "what its jobs share has changed: scheduler (Constant, now Cosine)" in capsys.readouterr().err


def test_a_sweep_is_reported(sweep: Path, here: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert here("task=report", f"run={sweep}") == 0
    assert "best optimizer.lr=0.1" in capsys.readouterr().out


def test_a_file_of_ones_own_may_name_the_older_path(tmp_path: Path, here: Callable[..., int]) -> None:
    (tmp_path / "mine" / "scheduler").mkdir(parents=True)
    text = "_target_: runner.schedules.Cosine\nfinal_factor: 0.5\n"
    (tmp_path / "mine" / "scheduler" / "half.yaml").write_text(text)
    assert here("--config-dir", "mine", "model=toy", "data=toy", "scheduler=half", "max_steps=2", "logger=none") == 0
