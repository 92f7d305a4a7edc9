"""profile=true leaves a trace and a table, and the weights as they are."""

import json
from pathlib import Path
from typing import Any

import pytest
from commands import Commands
from worlds import Run, configure, run

from runner.errors import InputError

SMALL = ("model=mlp", "model.hidden=[16]", "data.sample_shape=[1,8,8]", "logger=none", "profile=true")


def events(one: Run) -> list[dict[str, Any]]:
    return json.loads((one.path / "profile" / "rank_0.json").read_text())["traceEvents"]


@pytest.mark.parametrize(("num_steps", "recorded"), [(30, 5), (3, 1), (1, 1)])
def test_a_few_steps_are_recorded(num_steps: int, recorded: int, tmp_path: Path) -> None:
    one = run(tmp_path, 1, *SMALL, f"max_steps={num_steps}")
    names = [event["name"] for event in events(one) if event.get("ph") == "X"]
    assert sum(name.startswith("Optimizer.step") for name in names) == recorded
    said = (one.path / "log.txt").read_text()
    assert "Self CPU %" in said and " aten::addmm " in said
    assert f"profile of {recorded} steps: {one.path / 'profile' / 'rank_0.json'}" in said
    assert one.result["state"] == "finished" and one.result["step"] == num_steps


def test_rank_0_is_recorded_with_its_collectives_and_the_weights_are_the_same(tmp_path: Path) -> None:
    watched = run(tmp_path / "watched", 2, *SMALL, "max_steps=12", "parallel=ddp")
    alone = run(tmp_path / "alone", 2, *SMALL[:-1], "max_steps=12", "parallel=ddp")
    assert watched.result["weights_sha256"] == alone.result["weights_sha256"]
    assert any("all_reduce" in event["name"] for event in events(watched))
    assert [path.name for path in (watched.path / "profile").iterdir()] == ["rank_0.json"]
    assert not (alone.path / "profile").exists()


def test_a_resumed_run_is_profiled_from_its_first_step(tmp_path: Path) -> None:
    one = run(tmp_path, 1, *SMALL, "max_steps=4")
    (one.path / "profile" / "rank_0.json").unlink()
    run(tmp_path, 1, f"resume='{one.path}'", "max_steps=4")  # nothing is left to do
    assert not (one.path / "profile" / "rank_0.json").exists()
    run(tmp_path, 1, f"resume='{one.path}'", "max_steps=6")
    assert sum(event["name"].startswith("Optimizer.step") for event in events(one) if event.get("ph") == "X") == 1


@pytest.mark.thorough
def test_the_profiler_prints_no_warnings(commands: Commands) -> None:
    done = commands.runner(*SMALL, "max_steps=3")
    assert (done.returncode, done.stderr) == (0, "")


def test_profile_is_refused_for_tasks_without_training(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="profile=true has no effect on task=collectives"):
        configure("task=collectives", "profile=true", f"outputs={tmp_path}")
