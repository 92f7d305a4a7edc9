"""The dashboards' real packages, offline: a run that lost steps and was resumed is one run without repeated points."""

import json
import shutil
from pathlib import Path

import pytest
from dashboards import read_mlflow, read_trackio
from worlds import run

from runner.records.run_files import read_metrics

SMALL = ("model=mlp", "model.hidden=[4]", "data.sample_shape=[1,8,8]", "batch_size=200", "name=small")
METRICS = ("metrics=f1", "metrics.f1.per_class=true", "checkpoint.every_steps=3", "eval_every_steps=4")


@pytest.fixture(autouse=True)
def no_accounts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the accounts and files of the user who runs the tests."""
    for name in ("WANDB_API_KEY", "WANDB_MODE", "MLFLOW_TRACKING_URI", "TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))  # with .netrc
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def run_and_resume(outputs: Path, *loggers: str) -> Path:
    """Run 8 steps with each choice of loggers, one after another; all but the last attempt lose their last steps."""
    resume = ""
    for number, logger in enumerate(loggers, start=1):
        words = [f"resume='{resume}'"] if resume else [*SMALL, *METRICS]
        path = run(outputs, 1, *words, *filter(None, [logger]), f"max_steps={8 * number}").path
        resume = str(path)
        if number < len(loggers):
            shutil.rmtree(path / "checkpoints" / f"step_{8 * number}")  # as if it had been killed before it saved
    return path


@pytest.mark.parametrize(
    ("option", "loggers"),
    [
        pytest.param("mlflow", ["logger=mlflow", ""], marks=pytest.mark.thorough),
        ("trackio", ["logger=csv", "logger=[csv,trackio]", ""]),  # which receives the steps before it was chosen
    ],
)
def test_a_resumed_run_is_one_run_with_each_point_once(option: str, loggers: list[str], tmp_path: Path) -> None:
    path = run_and_resume(tmp_path / "outputs", *loggers)
    store = f"sqlite:///{tmp_path / 'outputs' / 'mlflow.db'}"
    (stored,) = read_mlflow(store) if option == "mlflow" else read_trackio(tmp_path / "trackio", "small")
    last_step = 8 * len(loggers)
    assert list(json.loads((path / "loggers.json").read_text())) == [option]
    assert (stored.name, stored.project) == (path.name, "small")

    expected: dict[str, dict[int, float]] = {}
    for line in read_metrics(path):
        for name in line.keys() - {"step", "epoch"}:
            expected.setdefault(name, {})[line["step"]] = line[name]
    assert {"train/loss", "val/f1/class_0", "val/loss"} < expected.keys() == stored.points.keys()
    for name, values in expected.items():
        points = stored.points[name]
        assert [step for step, _ in points] == sorted(values), name
        if not name.startswith("perf/"):  # of a repeated step the first value is kept, which is equal
            assert dict(points) == pytest.approx(values, abs=0), name
    assert list(dict(stored.points["train/loss"])) == list(range(1, last_step + 1))
    assert len(stored.images) == len(set(stored.images)) == last_step // 4 - (option == "trackio")
    assert str(stored.params["seed"]) == "0" and stored.params["model"] == "mlp"
    if option == "mlflow":
        assert stored.status == "FINISHED"
        assert stored.tags["state"] == "finished" and stored.tags["directory"] == str(path)
        assert stored.params["max_steps"] == "8" and stored.tags["resumed/max_steps"] == "16"  # params are immutable


@pytest.mark.thorough
def test_an_offline_run_of_wandb_has_a_file_with_one_id_for_each_attempt(tmp_path: Path) -> None:
    path = run_and_resume(tmp_path / "outputs", "logger=wandb", "")
    (run_id,) = json.loads((path / "loggers.json").read_text())["wandb"].values()
    files = sorted(path.glob(f"wandb/offline-run-*-{run_id}/run-{run_id}.wandb"))
    assert len(files) == len(list(path.glob("wandb/offline-run-*"))) == 2
    assert all(file.stat().st_size > 0 for file in files)
    images = [[int(image.name.split("_")[1]) for image in file.parent.rglob("confusion_*.png")] for file in files]
    assert [sorted(steps) for steps in images] == [[4, 8], [8, 12, 16]]  # step 8 is repeated
