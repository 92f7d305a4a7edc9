"""The files of a run directory."""

import sys
import threading
from pathlib import Path

import pytest

from runner.config.schema import Config
from runner.records.attempts import read_attempts
from runner.records.run_directory import Command, RunDirectory, new_directory
from runner.records.run_record import RunRecord, find_run, report_failure


@pytest.mark.fault("runs started in the same second", outcome="went_on")
def test_runs_of_the_same_second_have_different_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runner.records.run_directory.time.strftime", lambda form: "20300101-000000")
    start = threading.Barrier(5)
    created: list[Path] = []

    def create() -> None:
        start.wait(timeout=120)
        created.append(new_directory(str(tmp_path), "run"))

    threads = [threading.Thread(target=create) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert len(set(created)) == 5 and set(created) == set((tmp_path / "run").iterdir())


def test_a_rank_that_does_not_write_leaves_the_directory_empty(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path, writes=False)
    directory.prepare(Config(), Command(), RunRecord(tmp_path))
    directory.commit()
    directory.log_metrics(1, 1, {"train/loss": 1.0})
    directory.save_record()
    directory.drop_metrics_after(0)
    assert list(tmp_path.iterdir()) == []


def test_the_record_is_complete_from_the_start(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    command = Command(overrides=("model=toy",), config_dirs=("/mine", "/other"))
    directory.prepare(Config(), command, RunRecord(tmp_path, model="toy"))
    directory.commit()
    run = find_run(tmp_path)
    assert (run.state, run.model, run.hosts) == ("running", "toy", directory.attempt.hosts)
    assert (tmp_path / "overrides.yaml").read_text() == "- --config-dir=/mine\n- --config-dir=/other\n- model=toy\n"
    assert not list(tmp_path.glob("*.tmp"))


class ClosedTerminal:
    def write(self, text: str) -> int:
        raise OSError(5, "Input/output error")

    def flush(self) -> None:
        raise OSError(5, "Input/output error")


def test_a_failure_is_recorded_without_a_terminal_and_on_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "result.json").write_text('{"state": "running", "metrics": {}}')
    (tmp_path / "log.txt").symlink_to("/dev/full")
    monkeypatch.setattr(sys, "stderr", ClosedTerminal())
    report_failure(tmp_path, "rank 0 has died")
    run = find_run(tmp_path)
    assert (run.state, run.error) == ("failed", "rank 0 has died")
    (tmp_path / "result.json").write_text('{"state": "run')
    assert not find_run(tmp_path).is_recorded


@pytest.mark.fault("a resume that fails", outcome="refused")
@pytest.mark.parametrize("state", ["failed", "preempted"])
def test_an_attempt_without_a_step_restores_the_record(state: str, tmp_path: Path) -> None:
    """The attempt has been committed, as if a signal had arrived just before its first step."""
    (tmp_path / "checkpoints" / "step_4").mkdir(parents=True)
    first = RunDirectory(tmp_path)
    first.prepare(Config(), Command(overrides=("seed=0",)), RunRecord(tmp_path))
    first.record.step = 4
    first.end("finished")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.suffix in (".json", ".yaml")}
    second = RunDirectory(tmp_path)
    second.prepare(Config(seed=1), Command(overrides=("seed=1",)), RunRecord(tmp_path))
    second.commit(first_step=4)
    assert (tmp_path / "overrides.yaml").read_bytes() != before["overrides.yaml"]
    second.end(state)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.name in before} == before
    assert [attempt.state for attempt in read_attempts(tmp_path)] == ["finished", state]


def test_a_run_with_flipped_bits_in_its_metrics_can_be_resumed(tmp_path: Path) -> None:
    """A line is kept unchanged, unless its step is damaged; an attempt without a step restores all lines."""
    path = tmp_path / "metrics.jsonl"
    lines = [b'{"step": %d, "train/loss": 0.5}\n' % step for step in range(1, 7)]
    lines[0] = lines[0].replace(b"loss", b"los\xf3")
    lines[1] = lines[1].replace(b'"step": 2', b'"step": "')
    lines[2] = lines[2].replace(b"3", b'"3"')
    path.write_bytes(b"".join(lines))
    (tmp_path / "checkpoints" / "step_4").mkdir(parents=True)
    (tmp_path / "overrides.yaml").write_bytes(b"- seed=0 # \xf3\n")
    directory = RunDirectory(tmp_path)
    directory.prepare(Config(), Command(), RunRecord(tmp_path))
    directory.commit()
    directory.drop_metrics_after(4)
    assert path.read_bytes() == lines[0] + lines[3]
    assert list(directory.evaluations("val/loss")) == []
    directory.end("failed")
    assert path.read_bytes() == b"".join(lines)
    assert (tmp_path / "overrides.yaml").read_bytes() == b"- seed=0 # \xf3\n"
