"""The run directory's files."""

import json
import threading
from pathlib import Path

from runner.config.schema import Config
from runner.runs.run_directory import Request, RunDirectory, new_directory, read_result


def test_no_two_runs_share_a_directory(tmp_path: Path) -> None:
    made: list[Path] = []
    threads = [threading.Thread(target=lambda: made.append(new_directory(str(tmp_path), "run"))) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(made)) == 20
    assert all(path.is_dir() and path.parent == tmp_path / "run" for path in made)


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
