"""fork=: a new run that continues from a checkpoint of another run."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from worlds import Run, run

TINY = ("model=mlp", "model.hidden=[16]", "data.sample_shape=[1,8,8]", "batch_size=200", "logger=none", "epochs=2")


@pytest.fixture
def parent(tmp_path: Path) -> Run:
    return run(tmp_path, 1, *TINY, "checkpoint.every_steps=4", "checkpoint.keep=9", "name=parent")


def test_a_fork_ends_as_its_parent_and_leaves_it_unchanged(parent: Run, tmp_path: Path) -> None:
    before = {path: path.read_bytes() for path in parent.path.rglob("*") if path.is_file()}
    fork = run(tmp_path, 2, f"fork={parent.path}", "checkpoint=step_12", "parallel=ddp", "name=fork")
    assert fork.path.parent.name == "fork" and fork.result["parent"] == str(parent.path)
    log = (fork.path / "log.txt").read_text()
    assert f"fork     of {parent.path}\n" in log and "resuming after step 12\n" in log
    assert fork.losses == pytest.approx(parent.losses, rel=1e-5)
    assert fork.result["metrics"]["val/loss"] == pytest.approx(parent.result["metrics"]["val/loss"], rel=1e-5)
    assert {path: path.read_bytes() for path in parent.path.rglob("*") if path.is_file()} == before
    # A fork is a run: it is resumed, evaluated, and forked itself, with other values.
    longer = run(tmp_path, 1, f"resume={fork.path}", "epochs=3")
    assert longer.result["epoch"] == 3 and longer.result["parent"] == str(parent.path)
    shutil.rmtree(parent.path)
    again = run(tmp_path, 1, f"fork={fork.path}", "optimizer.lr=0.001", "epochs=4", "name=again", "parallel=none")
    assert "resuming after step 24\n" in (again.path / "log.txt").read_text()
    assert again.result["epoch"] == 4 and again.result["parent"] == str(fork.path)
    evaluated = run(tmp_path, 1, f"run={again.path}", "task=evaluate", "name=evaluated")
    assert evaluated.result["metrics"]["val/loss"] == again.result["metrics"]["val/loss"]


def test_invalid_forks_are_refused(
    parent: Run, here: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for words, message in (
        (("seed=1",), "seed=1 cannot change when a run is resumed"),
        (("epochs=1",), "epochs=1 is below the current epoch"),
        (("checkpoint=step_3",), "has no checkpoint step_3, only step_4"),
        (("resume=last",), "exclude each other; drop one"),
        (("task=measure",), f"fork={parent.path} has no effect on task=measure"),
    ):
        assert here(f"fork={parent.path}", *words, "name=other") == 2
        assert message in capsys.readouterr().err
    for file in parent.path.glob("checkpoints/step_*/rank_0.safetensors"):
        file.write_bytes(b"damaged")
    assert here(f"fork={parent.path}", "name=other") == 2
    assert capsys.readouterr().err.startswith(f"fork={parent.path}: ")
    shutil.rmtree(parent.path / "checkpoints")
    assert here(f"fork={parent.path}", "name=other") == 2
    assert f"fork={parent.path} has no checkpoint yet" in capsys.readouterr().err
    assert not (tmp_path / "outputs" / "other").exists()
