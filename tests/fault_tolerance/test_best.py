"""The best checkpoint stays and is found by its name, and a run ends early when its monitor gets no better."""

import json
import math
import shutil
from pathlib import Path

import pytest
from worlds import Run, configure, run

from runner.errors import InputError
from runner.runs.monitor import Monitor
from runner.runs.train_state import available

# A learning rate that is too large: the loss of this model is best in the middle of the run, and then it gets worse.
WORDS = ("model=mlp", "model.hidden=[16]", "batch_size=200", "logger=none", "precision=fp64", "monitor=val/loss")
UNSTEADY = (*WORDS, "seed=2", "epochs=8", "optimizer.lr=0.3", "optimizer.momentum=0.9")


def values(of: Run, name: str = "val/loss") -> dict[int, float]:
    return {line["step"]: line[name] for line in of.lines if name in line}


def test_best_is_ranked_by_its_end_and_equal_ones_by_age() -> None:
    found = {4: 0.5, 2: 0.5, 1: math.nan, 3: 0.7, 5: math.inf}
    assert Monitor("val/accuracy", "max").best(found) == [3, 2, 4]
    assert Monitor("val/loss", "min").best(found) == [2, 4, 3]


@pytest.mark.parametrize(("world_size", "mode"), [(1, "none"), (2, "fsdp")])
def test_the_best_stay_beside_the_newest(world_size: int, mode: str, tmp_path: Path) -> None:
    """Also those between two checkpoints, and over a resume: the values are known from what was logged."""
    words = (
        *UNSTEADY,
        f"parallel={mode}",
        "checkpoint.keep_best=2",
        "checkpoint.keep=1",
        "checkpoint.every_epochs=100",
    )
    part = run(tmp_path, world_size, *words, "max_steps=30")
    end = run(tmp_path, world_size, f"resume={part.path}", f"outputs={tmp_path}", "max_steps=56")
    measured = values(end)
    ranked = sorted(measured, key=lambda step: measured[step])
    assert ranked[0] not in (8, 56), f"the words must make a run that gets better and then worse, not {measured}"
    folder = end.path / "checkpoints"
    assert {path.name for path in available(folder)} == {f"step_{step}" for step in (*ranked[:2], 56)}
    assert (folder / "best").readlink() == Path(f"step_{ranked[0]}")
    assert (folder / "last").readlink() == Path("step_56")
    assert end.result["best"] == {"step": ranked[0], "value": measured[ranked[0]]}
    for name, step in (("best", ranked[0]), (f"step_{ranked[1]}", ranked[1]), ("last", 56)):
        words = (f"run={end.path}", "task=evaluate", f"checkpoint={name}", f"outputs={tmp_path / name}")
        assert run(tmp_path / name, world_size, *words).result["metrics"]["val/loss"] == pytest.approx(
            measured[step], rel=1e-12
        )


def test_it_ends_when_the_monitor_gets_no_better_and_stays_ended(tmp_path: Path) -> None:
    stops = ("early_stop.patience=2", "early_stop.min_delta=0.01")
    whole = run(tmp_path / "whole", 2, *UNSTEADY, "parallel=ddp", *stops)
    assert whole.result["state"] == "finished" and whole.result["step"] < 64
    assert "val/loss has not improved by 0.01 for 2 evaluations, since step" in whole.result["stopped"]
    assert whole.result["stopped"] in (whole.path / "log.txt").read_text()

    # Interrupted at the end of an epoch it ends at the same step, with the same weights.
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


def test_what_is_not_there_is_told_by_name(tmp_path: Path) -> None:
    done = run(tmp_path, 1, *WORDS, "max_steps=3", "checkpoint.keep_best=0")
    reads = (f"run={done.path}", "task=evaluate")
    for words, told in (
        ((*reads, "checkpoint=best"), "holds no best checkpoint, but step_3: none is kept with checkpoint.keep_best=0"),
        ((*reads, "checkpoint=step_4"), "holds no checkpoint step_4, but step_3"),
        ((*reads, "checkpoint=bst"), "checkpoint=bst must be last, best or step_N; did you mean best"),
        (("checkpoint=best",), "checkpoint=best has no effect on task=train"),
        (("early_stop.min_delta=0.1",), "early_stop.min_delta=0.1 has no effect without early_stop.patience"),
        (("early_stop.patience=0",), "early_stop.patience=0 must be at least 1"),
    ):
        with pytest.raises(InputError) as refused:
            configure(*words)
        assert told in str(refused.value) and len(refused.value.messages) == 1


@pytest.mark.fault("one bit of a checkpoint flipped", outcome="refused")
def test_a_damaged_one_that_is_named_is_not_passed_over(tmp_path: Path) -> None:
    done = run(tmp_path, 1, *WORDS, "max_steps=20")
    best = (done.path / "checkpoints" / "best").resolve()
    state = json.loads((best / "progress.json").read_text())
    (best / "progress.json").write_text(json.dumps({**state, "epoch": 7}))
    with pytest.raises(Exception, match=r"progress.json is not what was saved"):
        run(tmp_path, 1, f"run={done.path}", "task=evaluate", "checkpoint=best", f"outputs={tmp_path}")


@pytest.mark.fault("retention beside a damaged newest checkpoint", outcome="survived")
def test_a_damaged_newest_one_costs_no_other_and_the_one_resumed_from_stays(tmp_path: Path) -> None:
    """A damaged one counts for nothing; that from which the run goes on is not written again, which a crash may end."""
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


def test_a_link_is_never_without_its_checkpoint(tmp_path: Path) -> None:
    """Where a run goes on before its best checkpoint was taken, the values of what is gone do not count."""
    words = (*UNSTEADY, "checkpoint.keep=9", "max_steps=42")
    done = run(tmp_path, 1, *words)
    shutil.rmtree((done.path / "checkpoints" / "best").resolve())
    again = run(tmp_path, 1, f"resume={done.path}", f"outputs={tmp_path}", "max_steps=43")
    folder, measured = again.path / "checkpoints", values(again)
    there = {int(path.name.removeprefix("step_")) for path in available(folder)}
    assert (folder / "best").resolve().name == f"step_{min(there & measured.keys(), key=lambda s: measured[s])}"
