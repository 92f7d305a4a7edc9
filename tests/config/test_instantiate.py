"""A class of one's own that lacks what its group's contract declares is refused before anything is written."""

from collections.abc import Callable
from inspect import get_annotations
from pathlib import Path

import pytest

from runner.config.validate import TASK_FACTS
from runner.launchers.task import Task

HALF = """
class Empty:
    pass

class Facts:
    reads_run = reads_checkpoint = needs_experiment = trains = picks_split = False
    section = None
"""


@pytest.mark.parametrize(
    ("group", "target", "said"),
    [
        (
            "task",
            "Empty",
            "the class lacks reads_run, reads_checkpoint, needs_experiment, trains, picks_split, section",
        ),
        ("task", "Facts", "the class lacks min_world_size, check, run, which runner.launchers.task.JobTask declares"),
        ("launcher", "Empty", "join_timeout_s, launch, which runner.launchers.protocol.Launcher declares"),
        (
            "parallel",
            "Empty",
            "needs_group, meta_init, spans_devices, carries, fails_at_once, axes, check, prepare, which",
        ),
        ("logger", "Empty", "wants_predictions, open, scalars, predictions, text, flush, close, which runner.runs"),
    ],
)
def test_what_lacks_members_of_its_contract_is_refused(
    group: str, target: str, said: str, tmp_path: Path, here: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    module = f"half_{group}_{target.lower()}"  # sys.modules keeps what an earlier test has imported
    (tmp_path / "mine" / group).mkdir(parents=True)
    (tmp_path / "mine" / f"{module}.py").write_text(HALF)
    (tmp_path / "mine" / group / "half.yaml").write_text(f"_target_: {module}.{target}\n")
    assert here("--config-dir", "mine", "model=toy", "data=toy", f"{group}=half") == 2
    error = capsys.readouterr().err
    assert error.startswith(f"{group}._target_={module}.{target}: ")
    assert said in error
    assert len(error.splitlines()) == 1
    assert not (tmp_path / "outputs").exists()


def test_what_a_tasks_class_declares_is_asked_of_it_before_it_is_made() -> None:
    assert set(TASK_FACTS) == set(get_annotations(Task))
