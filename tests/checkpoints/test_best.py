"""The best checkpoints are kept and found by name, and a run stops early if its monitor does not improve."""

import math
import shutil
from pathlib import Path

import pytest
from worlds import Run, configure, run

from runner.checkpoints.layout import list_checkpoints
from runner.checkpoints.retention import remove_leftovers, retain
from runner.errors import InputError
from runner.records.monitor import Monitor

# The learning rate is too large: the loss is lowest in the middle of the run and then increases.
WORDS = ("model=mlp", "model.hidden=[16]", "batch_size=200", "logger=none", "precision=fp64", "monitor=val/loss")
UNSTEADY = (*WORDS, "seed=2", "epochs=8", "optimizer.lr=0.3", "optimizer.momentum=0.9")


def values(of: Run, name: str = "val/loss") -> dict[int, float]:
    return {line["step"]: line[name] for line in of.lines if name in line}


def test_best_follows_the_direction_and_prefers_earlier_steps() -> None:
    found = {4: 0.5, 2: 0.5, 1: math.nan, 3: 0.7, 5: math.inf}
    assert Monitor("val/accuracy", "max").best(found) == [3, 2, 4]
    assert Monitor("val/loss", "min").best(found) == [2, 4, 3]


def test_the_best_checkpoints_are_kept(tmp_path: Path) -> None:
    """Also between two periodic checkpoints, and after a resume: the values are read from the logged metrics."""
    words = (*UNSTEADY, "parallel=fsdp", "checkpoint.keep_best=2", "checkpoint.keep=1", "checkpoint.every_epochs=100")
    part = run(tmp_path, 2, *words, "max_steps=30")
    end = run(tmp_path, 2, f"resume={part.path}", f"outputs={tmp_path}", "max_steps=56")
    measured = values(end)
    ranked = sorted(measured, key=lambda step: measured[step])
    assert ranked[0] not in (8, 56), f"the loss must decrease and then increase: {measured}"
    folder = end.path / "checkpoints"
    assert {path.name for path in list_checkpoints(folder)} == {f"step_{step}" for step in (*ranked[:2], 56)}
    assert (folder / "best").readlink() == Path(f"step_{ranked[0]}")
    assert (folder / "last").readlink() == Path("step_56")
    assert end.result["best"] == {"step": ranked[0], "value": measured[ranked[0]]}
    for name, step in (("best", ranked[0]), (f"step_{ranked[1]}", ranked[1]), ("last", 56)):
        words = (f"run={end.path}", "task=evaluate", f"checkpoint={name}", f"outputs={tmp_path / name}")
        assert run(tmp_path / name, 2, *words).result["metrics"]["val/loss"] == pytest.approx(measured[step], rel=1e-12)


@pytest.mark.thorough
def test_a_run_stops_early_and_stays_finished(tmp_path: Path) -> None:
    stops = ("early_stop.patience=2", "early_stop.min_delta=0.01")
    whole = run(tmp_path / "whole", 2, *UNSTEADY, "parallel=ddp", *stops)
    assert whole.result["state"] == "finished" and whole.result["step"] < 64
    assert "val/loss has not improved by 0.01 for 2 evaluations, since step" in whole.result["stopped"]
    assert whole.result["stopped"] in (whole.path / "log.txt").read_text()

    # A run that is interrupted at the end of an epoch stops at the same step.
    parts = tmp_path / "parts"
    part = run(parts, 1, *UNSTEADY, *stops, f"max_steps={whole.result['step'] - 8}")
    assert part.result["stopped"] is None
    part = run(parts, 1, f"resume={part.path}", f"outputs={parts}", "max_steps=64")
    assert part.result["step"] == whole.result["step"]
    assert part.result["stopped"] == whole.result["stopped"]

    again = run(parts, 1, f"resume={part.path}", f"outputs={parts}")
    assert again.result["state"] == "finished" and again.result["step"] == whole.result["step"]
    further = run(parts, 1, f"resume={part.path}", f"outputs={parts}", "early_stop.patience=9")
    assert further.result["stopped"] is None and further.result["step"] == 64


def test_missing_checkpoints_and_invalid_options_are_named(tmp_path: Path) -> None:
    done = run(tmp_path, 1, *WORDS, "max_steps=3", "checkpoint.keep_best=0")
    reads = (f"run={done.path}", "task=evaluate")
    for words, told in (
        ((*reads, "checkpoint=best"), "has no checkpoint best, only step_3: none is kept with checkpoint.keep_best=0"),
        ((*reads, "checkpoint=bst"), "checkpoint=bst must be last, best or step_N; did you mean best"),
        (("checkpoint=best",), "checkpoint=best has no effect on task=train"),
        (("early_stop.min_delta=0.1",), "early_stop.min_delta=0.1 has no effect without early_stop.patience"),
    ):
        with pytest.raises(InputError) as refused:
            configure(*words)
        assert told in str(refused.value) and len(refused.value.messages) == 1


@pytest.mark.fault("retention with a damaged newest checkpoint", outcome="survived")
def test_a_damaged_newest_checkpoint_is_not_counted(tmp_path: Path) -> None:
    """The checkpoint that the run is resumed from is not written again, because a crash might interrupt that."""
    words = (*WORDS, "checkpoint.every_steps=5", "checkpoint.keep=1", "eval_every_steps=5")
    done = run(tmp_path, 1, *words, "max_steps=5")
    folder = done.path / "checkpoints"
    sound = (folder / "step_5").stat().st_ino
    shutil.copytree(folder / "step_5", folder / "step_13")
    (folder / "step_13" / "manifest.json").unlink()
    for link in ("last", "best"):
        (folder / link).unlink()
        (folder / link).symlink_to("step_13")
    again = run(tmp_path, 1, f"resume={done.path}", f"outputs={tmp_path}", "max_steps=5")
    assert (folder / "step_5").stat().st_ino == sound
    assert again.result["weights_sha256"] == done.result["weights_sha256"] is not None
    assert [(folder / link).readlink() for link in ("last", "best")] == [Path("step_5")] * 2
    run(tmp_path, 1, f"resume={done.path}", f"outputs={tmp_path}", "max_steps=12", "checkpoint.keep_best=0")
    assert (folder / "last").readlink() == Path("step_12") and (folder / "step_12" / "rank_0.safetensors").is_file()


@pytest.mark.fault("a link in place of a checkpoint", outcome="went_on")
def test_retention_removes_a_link_but_not_the_files_to_which_it_refers(tmp_path: Path) -> None:
    folder, moved = tmp_path / "checkpoints", tmp_path / "moved"
    for path in (moved, folder / "step_20"):
        path.mkdir(parents=True)
        (path / "state.json").touch()
    for name in ("step_10", "step_5.deleting", "step_7.tmp"):
        (folder / name).symlink_to(moved)
    remove_leftovers(folder)
    retain(folder, keep=1, best=[], newest=20)
    assert [path.name for path in folder.iterdir()] == ["step_20"]
    assert (moved / "state.json").exists()
