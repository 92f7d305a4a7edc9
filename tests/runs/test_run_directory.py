"""The run directory's files."""

import json
import threading
from pathlib import Path

import pytest

from runner.config.schema import Config
from runner.runs.attempts import read_attempts
from runner.runs.run_directory import Request, RunDirectory, new_directory, read_result


@pytest.mark.fault("runs of the same second", outcome="went_on")
def test_no_two_runs_share_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runner.runs.run_directory.time.strftime", lambda form: "20300101-000000")
    start = threading.Barrier(20)
    made: list[Path] = []

    def make() -> None:
        start.wait(timeout=120)
        made.append(new_directory(str(tmp_path), "run"))

    threads = [threading.Thread(target=make) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert len(set(made)) == 20 and set(made) == set((tmp_path / "run").iterdir())


def test_only_the_rank_that_writes_writes(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path, writes=False)
    directory.record(Config(), Request())
    directory.log_metrics(1, 1, {"train/loss": 1.0})
    directory.save_result()
    directory.forget_after(0)
    assert list(tmp_path.iterdir()) == []


def test_result_is_there_from_the_start_and_in_one_piece(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    directory.record(Config(), Request(overrides=("model=toy",), config_dirs=("/mine", "/other")), model="toy")
    result = read_result(tmp_path)
    assert result is not None and (result["state"], result["model"]) == ("running", "toy")
    assert (tmp_path / "overrides.yaml").read_text() == "- --config-dir=/mine\n- --config-dir=/other\n- model=toy\n"
    assert not list(tmp_path.glob("*.tmp"))


def test_no_result_to_read_is_none(tmp_path: Path) -> None:
    assert read_result(tmp_path) is None
    (tmp_path / "result.json").write_text('{"state": "run')
    assert read_result(tmp_path) is None


@pytest.mark.fault("a resume that fails", outcome="refused")
@pytest.mark.parametrize("state", ["failed", "preempted"])
def test_one_that_comes_to_no_step_leaves_the_record_as_it_was(state: str, tmp_path: Path) -> None:
    """Also where a signal comes after what it needs was loaded."""
    (tmp_path / "checkpoints" / "step_4").mkdir(parents=True)
    first = RunDirectory(tmp_path)
    first.record(Config(), Request(overrides=("seed=0",)))
    first.result.step = 4
    first.end("finished")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.suffix in (".json", ".yaml")}
    second = RunDirectory(tmp_path)
    second.prepare(Config(seed=1), Request(overrides=("seed=1",)))
    second.commit(first_step=4)
    assert (tmp_path / "overrides.yaml").read_bytes() != before["overrides.yaml"]
    second.end(state)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.name in before} == before
    assert [attempt.state for attempt in read_attempts(tmp_path)] == ["finished", state]


def test_metrics_of_steps_that_come_again_are_forgotten(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    for step in range(1, 6):
        directory.log_metrics(step, 1, {"train/loss": step / 10})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "epo')  # a crash in mid-line
    directory.forget_after(3)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert lines[0] == {"step": 1, "epoch": 1, "train/loss": 0.1}


def test_a_flipped_bit_in_the_metrics_keeps_no_run_from_going_on(tmp_path: Path) -> None:
    """The line stays as it is, unless it has lost its step; a resume that comes to no step puts all back."""
    path = tmp_path / "metrics.jsonl"
    lines = [b'{"step": %d, "train/loss": 0.5}\n' % step for step in range(1, 7)]
    lines[0] = lines[0].replace(b"loss", b"los\xf3")
    lines[1] = lines[1].replace(b'"step": 2', b'"step": "')
    lines[2] = lines[2].replace(b"3", b'"3"')
    path.write_bytes(b"".join(lines))
    (tmp_path / "checkpoints" / "step_4").mkdir(parents=True)
    (tmp_path / "overrides.yaml").write_bytes(b"- seed=0 # \xf3\n")
    directory = RunDirectory(tmp_path)
    directory.record(Config(), Request())
    directory.forget_after(4)
    assert path.read_bytes() == lines[0] + lines[3]
    assert list(directory.evaluations("val/loss")) == []
    directory.end("failed")
    assert path.read_bytes() == b"".join(lines)
    assert (tmp_path / "overrides.yaml").read_bytes() == b"- seed=0 # \xf3\n"
