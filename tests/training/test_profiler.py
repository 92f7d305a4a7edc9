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


@pytest.mark.parametrize(("num_steps", "recorded"), [pytest.param(12, 5, marks=pytest.mark.thorough), (3, 1)])
def test_a_few_steps_of_rank_0_are_recorded_and_the_weights_are_the_same(
    num_steps: int, recorded: int, tmp_path: Path
) -> None:
    words = (*SMALL, f"max_steps={num_steps}", "parallel=ddp")
    one, alone = run(tmp_path / "one", 2, *words), run(tmp_path / "alone", 2, *words, "profile=false")
    assert one.result["weights_sha256"] == alone.result["weights_sha256"]
    names = [event["name"] for event in events(one) if event.get("ph") == "X"]
    assert sum(name.startswith("Optimizer.step") for name in names) == recorded
    assert any("all_reduce" in name for name in names)
    said = (one.path / "log.txt").read_text()
    assert "Self CPU %" in said and " aten::addmm " in said
    assert f"profile of {recorded} steps: {one.path / 'profile' / 'rank_0.json'}" in said
    assert [path.name for path in (one.path / "profile").iterdir()] == ["rank_0.json"]


@pytest.mark.thorough
def test_a_resumed_run_is_profiled_from_its_first_step(tmp_path: Path) -> None:
    one = run(tmp_path, 1, *SMALL, "max_steps=1")
    run(tmp_path, 1, f"resume='{one.path}'", "max_steps=1")  # nothing is left to do
    assert not (one.path / "profile" / "rank_0.json").exists()
    run(tmp_path, 1, f"resume='{one.path}'", "max_steps=3")
    assert sum(event["name"].startswith("Optimizer.step") for event in events(one) if event.get("ph") == "X") == 1


@pytest.mark.thorough
def test_the_profiler_prints_no_warnings(commands: Commands) -> None:
    done = commands.runner(*SMALL, "max_steps=3")
    assert (done.returncode, done.stderr) == (0, "")


def test_profile_is_refused_for_tasks_without_training(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="profile=true has no effect on task=collectives"):
        configure("task=collectives", "profile=true", f"outputs={tmp_path}")
