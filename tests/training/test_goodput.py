"""The goodput of a run over its attempts, and the model FLOPs utilization from a data sheet."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from worlds import Run, build_experiment, configure, run

from runner.planning import costs
from runner.records import run_directory
from runner.records.attempts import Attempt, append_attempt, read_attempts, seconds_of
from runner.tasks import train
from runner.training.build import Experiment

TINY = ("model=linear", "data=random", "batch_size=32", "logger=none", "precision=fp64")


def productive_s(trained: Run) -> float:
    return max(trained.values("perf/productive_s").values())


def test_seconds_of_attempts_exclude_the_time_between_them(tmp_path: Path) -> None:
    for number, (started, ended) in enumerate([("01:00:00", "01:00:30"), ("05:00:00", "05:01:00"), ("06:00:00", None)]):
        at, end = f"2026-11-22T{started}+00:00", ended and f"2026-11-22T{ended}+00:00"
        append_attempt(tmp_path, Attempt(number, started=at, ended=end))
    append_attempt(tmp_path, Attempt(4, started="yesterday", ended="today"))
    assert seconds_of(tmp_path) == 90


def test_repeated_steps_and_earlier_attempts_lower_the_goodput(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A resumed run counts the productive seconds up to its checkpoint, and all seconds of its attempts."""
    first = run(tmp_path, 1, *TINY, "max_steps=4")
    before = productive_s(first)
    assert 0 < first.result["goodput"] < 1 and first.values("perf/goodput").keys() == {1, 2, 3, 4}
    recorded = [*read_attempts(first.path)]
    assert all("." in f"{each.started}{each.ended}".partition("T")[2] for each in recorded)  # milliseconds
    assert seconds_of(first.path) > before
    monkeypatch.setattr(run_directory, "seconds_of", lambda *_: 1000.0)
    resumed = run(tmp_path, 1, f"resume={first.path}", "max_steps=6")
    after = productive_s(resumed)
    assert after > before and resumed.result["goodput"] == pytest.approx(after / 1000, abs=1e-3)


def test_the_seconds_of_a_forked_run_are_its_own(tmp_path: Path) -> None:
    parent = run(tmp_path, 1, *TINY, "max_steps=4", "checkpoint.every_steps=2")
    metrics = parent.path / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace('"perf/productive_s": 0', '"perf/productive_s": 1000'))
    fork = run(tmp_path, 1, *TINY, f"fork={parent.path}", "max_steps=6")
    assert fork.result["goodput"] < 1


@pytest.mark.cpu("a CPU has no MFU")
def test_mfu_is_the_speed_relative_to_the_data_sheet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is logged after the warm-up; a CPU has none."""
    assert run(tmp_path / "cpu", 1, *TINY, "max_steps=22").result["mfu"] is None
    monkeypatch.setattr(train, "_shortest_seconds", lambda *_: 1e-6)
    trained = run(tmp_path / "gpu", 1, *TINY, "max_steps=22")
    assert min(trained.values("perf/mfu")) == 21
    assert trained.result["mfu"] == pytest.approx(trained.result["samples_per_second"] * 1e-6, abs=1e-4)


def test_the_shortest_time_of_a_model_on_an_imagined_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The reason is logged if the model cannot be called on the meta device, where tensors have no values."""
    caplog.set_level("INFO")
    monkeypatch.setattr(costs, "name_of_gpu", lambda directories: "h100")
    devices = [torch.device("cuda:0")]
    world = SimpleNamespace(device=devices[0], devices=devices, world_size=2)
    directory = SimpleNamespace(writes=True, record=SimpleNamespace(config_dirs=[]))

    def find(experiment: Experiment) -> float | None:
        return train._shortest_seconds(configure(*TINY)[0], experiment, world, directory)  # type: ignore[arg-type]

    experiment = build_experiment(*TINY)
    flops = 2 * (2 * 20)  # forward, and the gradient of the weights
    assert find(experiment) == pytest.approx(flops / 67e12 / 2, abs=0)
    assert "67 TFLOP/s of each h100" in caplog.text

    def make_model() -> nn.Module:
        raise RuntimeError("it reads values")

    assert find(replace(experiment, make_model=make_model)) is None
    assert "not measured" in caplog.text and "it reads values" in caplog.text
