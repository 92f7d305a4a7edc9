"""Each dashboard for real and offline: a run that lost steps and was resumed is one run, with every point once."""

import json
import shutil
from pathlib import Path

import pytest
from dashboards import Held, read_mlflow, read_trackio, read_wandb
from worlds import run

from runner.runs.loggers.wandb_file import BLOCK, CHUNK, FULL, LAST, _records

SMALL = ("model=mlp", "model.hidden=[4]", "data.sample_shape=[1,8,8]", "batch_size=200", "name=small")
METRICS = ("metrics=f1", "metrics.f1.per_class=true", "checkpoint.every_steps=3", "eval_every_steps=4")


@pytest.fixture(autouse=True)
def nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever runs the tests may have accounts, and files of their own."""
    for name in ("WANDB_API_KEY", "WANDB_MODE", "MLFLOW_TRACKING_URI", "TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))  # with .netrc
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def read(option: str, path: Path) -> Held:
    if option == "wandb":
        return read_wandb(path)
    outputs = path.parents[1]
    stored = read_mlflow(f"sqlite:///{outputs / 'mlflow.db'}") if option == "mlflow" else None
    (held,) = stored if stored is not None else read_trackio(outputs.parent / "trackio", "small")
    return held


@pytest.mark.parametrize(
    ("option", "starts"),
    [
        pytest.param("mlflow", ["logger=mlflow", ""], marks=pytest.mark.thorough),
        pytest.param("wandb", ["logger=wandb", ""], marks=pytest.mark.thorough),
        ("trackio", ["logger=csv", "logger=[csv,trackio]", ""]),  # what it was not there for is made up
    ],
)
def test_a_resumed_run_is_one_with_every_point_once(option: str, starts: list[str], tmp_path: Path) -> None:
    outputs, resume = tmp_path / "outputs", ""
    for number, word in enumerate(starts, start=1):
        words = [f"resume='{resume}'"] if resume else [*SMALL, *METRICS]
        path = run(outputs, 1, *words, *filter(None, [word]), f"max_steps={8 * number}").path
        resume = str(path)
        if number < len(starts):
            shutil.rmtree(path / "checkpoints" / f"step_{8 * number}")  # as if it had been killed before it saved
    last = 8 * len(starts)
    held = read(option, path)
    assert list(json.loads((path / "loggers.json").read_text())) == [option]
    assert (held.name, held.project) == (path.name, "small")

    expected: dict[str, dict[int, float]] = {}
    for line in map(json.loads, (path / "metrics.jsonl").read_text().splitlines()):
        for name in line.keys() - {"step", "epoch"}:
            expected.setdefault(name, {})[line["step"]] = line[name]
    assert {"train/loss", "val/f1/class_0", "val/loss"} < expected.keys() == held.points.keys()
    for name, values in expected.items():
        points = held.points[name]
        assert [step for step, _ in points] == sorted(values), name
        if not name.startswith("perf/"):  # of a step that was made twice, the first is kept: they are the same
            assert dict(points) == pytest.approx(values, abs=0), name
    assert list(dict(held.points["train/loss"])) == list(range(1, last + 1))
    assert len(held.pictures) == len(set(held.pictures)) == last // 4 - (option == "trackio")
    if option != "wandb":
        assert str(held.params["seed"]) == "0" and held.params["model"] == "mlp"
    if option == "wandb":
        assert held.params["model"]["_target_"] == "models.mlp.MLP" and held.params["typed"]["model"] == "mlp"
    if option != "trackio":
        assert held.status == "FINISHED"
    if option == "mlflow":
        assert held.tags["state"] == "finished" and held.tags["directory"] == str(path)
        assert held.params["max_steps"] == "8" and held.tags["resumed/max_steps"] == "16"  # no parameter changes there


def test_a_file_of_wandb_that_a_kill_cut_short_is_read_up_to_there(tmp_path: Path) -> None:
    first, rest, whole = b"a" * (BLOCK - 7 - CHUNK.size - CHUNK.size), b"b" * 3, b"c" * 10
    data = b":W&B\xe1\xbe\x00" + CHUNK.pack(0, len(first), FULL) + first
    assert BLOCK - len(data) == CHUNK.size  # an empty first chunk is all that still fits
    data += CHUNK.pack(0, 0, 2) + CHUNK.pack(0, len(rest), LAST) + rest + CHUNK.pack(0, len(whole), FULL) + whole
    assert list(_records(data)) == [first, rest, whole]
    assert list(_records(data[:-1])) == [first, rest]
    assert list(_records(data[:9])) == list(_records(b"")) == []
