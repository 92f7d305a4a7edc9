"""Tests that a custom class without the members of its contract is refused before anything is written."""

from collections.abc import Callable
from inspect import get_annotations
from pathlib import Path

import pytest

from runner.config.schema import Config, apply_debug
from runner.config.validate import TASK_FACTS, check_fit
from runner.jobs.task import Task

HALF = """
from runner.jobs.task import JobTask

class Derived(JobTask):
    pass

class Empty:
    pass

class Facts:
    reads_run = reads_checkpoint = needs_experiment = trains = picks_split = False
    section = None
"""


@pytest.mark.parametrize(
    ("group", "target", "message"),
    [
        ("task", "Empty", "the class lacks reads_run, reads_checkpoint, needs_experiment, trains, picks_split"),
        ("task", "Facts", "the class lacks min_world_size, check, run, which runner.jobs.task.JobTask declares"),
        ("task", "Derived", "the class lacks run; define it"),
        ("launcher", "Empty", "join_timeout_s, launch, which runner.launchers.contract.Launcher declares"),
    ],
)
def test_missing_contract_members_are_refused(
    group: str, target: str, message: str, tmp_path: Path, here: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    module = f"half_{group}_{target.lower()}"  # sys.modules keeps what an earlier test has imported
    (tmp_path / "mine" / group).mkdir(parents=True)
    (tmp_path / "mine" / f"{module}.py").write_text(HALF)
    (tmp_path / "mine" / group / "half.yaml").write_text(f"_target_: {module}.{target}\n")
    assert here("--config-dir", "mine", "model=toy", "data=toy", f"{group}=half") == 2
    error = capsys.readouterr().err
    assert error.startswith(f"{group}._target_={module}.{target}: ")
    assert message in error
    assert len(error.splitlines()) == 1
    assert not (tmp_path / "outputs").exists()


def test_checked_task_attributes_are_those_of_the_contract() -> None:
    assert set(TASK_FACTS) == set(get_annotations(Task))


def test_custom_loader_without_the_builtin_options_is_accepted() -> None:
    config = Config(loader={"_target_": "mine.Loader", "size": 3}, debug=True)
    assert check_fit(config, "cpu") == check_fit(config, None) == []
    assert apply_debug(config).loader == config.loader
