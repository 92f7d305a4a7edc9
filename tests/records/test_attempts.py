"""Resumed runs: the record of the attempt that trained last, and a line for each attempt."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from runner.records.attempts import Attempt, append_attempt, error_line, initial_values, read_attempts
from runner.records.run_lock import lock_directory

SMALL = ("model=mlp", "model.hidden=[16]", "data.sample_shape=[1,8,8]", "batch_size=200", "logger=none", "threads=1")
RECORD = ("config.yaml", "overrides.yaml", "result.json", "metrics.jsonl")


def run_here(here: Callable[..., int], *words: str) -> Path:
    assert here(*SMALL, *words) == 0
    return max(Path("outputs/run").absolute().iterdir())


def record_of(path: Path) -> dict[str, bytes]:
    return {name: (path / name).read_bytes() for name in RECORD}


def attempts_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (path / "attempts.jsonl").read_text().splitlines()]


def result_of(path: Path) -> dict[str, Any]:
    return json.loads((path / "result.json").read_text())


def damage(path: Path) -> dict[Path, bytes]:
    """Damage all checkpoints without changing their sizes, and return the original bytes."""
    shards = {shard: shard.read_bytes() for shard in (path / "checkpoints").glob("step_*/*.safetensors")}
    for shard, content in shards.items():
        shard.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    return shards


@pytest.mark.fault("a resume that fails", outcome="refused")
def test_a_failed_resume_keeps_the_record_except_the_state_running(here: Callable[..., int]) -> None:
    run = run_here(here, "max_steps=4")
    before = record_of(run)
    originals = damage(run)
    assert here(f"resume={run}", "optimizer.lr=0.01", "max_steps=6") == 2
    assert record_of(run) == before
    (first, second) = attempts_of(run)
    assert (first["number"], first["state"], first["first_step"], first["step"]) == (1, "finished", 0, 4)
    assert (second["number"], second["state"], second["step"]) == (2, "failed", None)
    assert "undamaged checkpoint" in second["error"]
    # The previous attempt was killed, so its record still has the state running.
    (run / "result.json").write_text(json.dumps({**result_of(run), "state": "running"}))
    assert here(f"resume={run}") == 2
    assert (result_of(run)["state"], result_of(run)["step"]) == ("failed", 4)
    for path, content in originals.items():
        path.write_bytes(content)
    assert here("resume=last", "max_steps=6") == 0
    assert (result_of(run)["state"], result_of(run)["step"]) == ("finished", 6)
    assert yaml.safe_load((run / "config.yaml").read_text())["optimizer"]["lr"] == 0.05
    assert attempts_of(run)[3]["first_step"] == 4


DEEP = "[" * 100_000


def test_damaged_attempts_and_lock_files_are_skipped(tmp_path: Path) -> None:
    append_attempt(tmp_path, Attempt(1, changed={"seed": [0, 1]}))
    good = json.loads((tmp_path / "attempts.jsonl").read_text())
    damaged = ({"changed": None}, {"changed": {"seed": [1]}}, {"number": True})
    with (tmp_path / "attempts.jsonl").open("a") as file:
        file.writelines(f"{json.dumps(good | each)}\n" for each in damaged)
        file.write(f"{DEEP}\n")
    assert [attempt.number for attempt in read_attempts(tmp_path)] == [1]
    assert initial_values(tmp_path, {"seed": 2}) == {"seed": 0}
    for number, text in ((1, json.dumps(good | {"number": "x"})), (2, DEEP), (3, "[1]")):
        (tmp_path / f"holder-{number}.json").write_text(text)
        os.utime(tmp_path / f"holder-{number}.json", (1, 1))
    lock_directory(tmp_path).release()
    assert [attempt.number for attempt in read_attempts(tmp_path)] == [1]
    assert not list(tmp_path.glob("holder-*"))


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (
            "rank 0 on host:\nrank 0, step 5: loss is inf\nthe samples are 3\ndebug=true helps",
            "rank 0, step 5: loss is inf",
        ),
        (
            'rank 1 on host:\nTraceback (most recent call last):\n  File "a.py", line 1\n    f()\nValueError: a\nb',
            "ValueError: a",
        ),
        ("one line", "one line"),
        ("rank 0 on host:", "rank 0 on host:"),
        (" ", None),
    ],
)
def test_the_line_of_a_report_that_names_the_error(text: str, line: str | None) -> None:
    assert error_line(text) == line
