"""A run resumed from a checkpoint ends at the weights of an uninterrupted run, in every mode."""

import shutil
from pathlib import Path

import pytest
from mode_cases import tier
from ranks import RankError
from worlds import MODES, configure, run

from runner.checkpoints.layout import list_checkpoints
from runner.errors import InputError

TINY = ("model=mlp", "model.hidden=[16]", "data.sample_shape=[1,8,8]", "batch_size=200", "logger=none")
ALONE = ("none", "dp")
# On four ranks, each order in which gradients are summed; soak repeats it with other modes and options.
SUMS = [
    ("parallel=ddp",),
    ("parallel=fsdp", "parallel.replicate=2"),
]
REPEATS = [
    ("parallel=tp", "parallel.rest=fsdp"),
    ("parallel=pipeline", "parallel.stages=2"),
    *((f"parallel={mode}",) for mode in ("ps", "allreduce", "local_sgd", "zero", "fsdp", "tp", "pipeline")),
    ("parallel=ddp", "parallel.static_graph=true"),
    ("parallel=ddp", "parallel.find_unused_parameters=true"),
    ("parallel=ddp", "parallel.bucket_cap_mb=0.001"),
    ("parallel=ddp", "parallel.comm_hook=fp16"),
    ("parallel=ddp", "micro_batches=2"),
]
SLICE = [
    pytest.param(
        (f"parallel={mode}",),
        1 if mode in ALONE else 2,
        id=f"{mode}-{1 if mode in ALONE else 2}",
        marks=tier(mode in ("none", "ddp", "fsdp"), True),
    )
    for mode in MODES
]
ON_FOUR = [
    pytest.param(words, 4, id=f"{' '.join(words)}-4", marks=mark)
    for ways, mark in ((SUMS, pytest.mark.thorough), (REPEATS, pytest.mark.soak))
    for words in ways
]


@pytest.mark.fault("the end of all ranks, in every mode", outcome="survived")
@pytest.mark.filterwarnings("ignore:parallel=dp")
@pytest.mark.parametrize(("words", "world_size"), [*SLICE, *ON_FOUR])
def test_a_resumed_run_has_the_same_weights_to_the_bit(words: tuple[str, ...], world_size: int, tmp_path: Path) -> None:
    """In float32, whose rounding shows in which order four ranks were summed; two ranks have only one order."""
    layers = ("model.hidden=[32,16,16]", "model.batch_norm=true", "model.dropout=0.2")
    steps = ("epochs=2", "scheduler=cosine", "checkpoint.every_steps=4", "checkpoint.keep=9")
    whole = run(tmp_path, world_size, *TINY, *layers, *steps, "optimizer=adamw", *words)
    weights, losses = whole.result["weights_sha256"], whole.losses
    kept = list_checkpoints(whole.path / "checkpoints")
    for path in kept[3:]:
        shutil.rmtree(path)
    assert kept[2].name == "step_12"  # the middle of the second epoch
    resumed = run(tmp_path, world_size, f"resume={whole.path}")
    assert resumed.path == whole.path
    assert "resuming after step 12" in (whole.path / "log.txt").read_text()
    assert [path.name for path in list_checkpoints(whole.path / "checkpoints")] == [path.name for path in kept]
    assert resumed.losses == losses
    assert resumed.result["weights_sha256"] == weights


def test_a_run_resumed_at_its_end_has_the_same_metrics(tmp_path: Path) -> None:
    """As after a kill between its last checkpoint and its last evaluation."""
    whole = run(tmp_path, 1, *TINY, "epochs=1")
    metrics = whole.result["metrics"]
    assert "train/loss" in metrics
    assert run(tmp_path, 1, f"resume={whole.path}").result["metrics"] == metrics


def test_a_changed_learning_rate_applies_after_resuming(tmp_path: Path) -> None:
    part = run(tmp_path, 1, *TINY, "max_steps=2", "optimizer.momentum=0.5")
    run(tmp_path, 1, f"resume={part.path}", f"outputs={tmp_path}", "max_steps=4", "optimizer.lr=0.25")
    assert [line.get("train/learning_rate") for line in part.lines if "train/loss" in line] == [0.05, 0.05, 0.25, 0.25]
    assert part.state["optimizer"]["param_groups"][0]["momentum"] == 0.5


def test_a_run_without_an_undamaged_checkpoint_does_not_restart(tmp_path: Path) -> None:
    """The first check compares only sizes, and does not detect a flipped bit."""
    done = run(tmp_path, 1, *TINY, "max_steps=2")
    file = done.path / "checkpoints" / "step_2" / "rank_0.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(RankError, match="no undamaged checkpoint"):
        run(tmp_path, 1, f"resume={done.path}", f"outputs={tmp_path}")
    assert [path.name for path in list_checkpoints(done.path / "checkpoints")] == ["step_2"]
    file.write_bytes(b"")
    with pytest.raises(InputError, match=r"has no valid checkpoint: .*step_2/rank_0.safetensors is not what was"):
        configure(f"resume={done.path}", f"outputs={tmp_path}")


def test_resume_refuses_another_batch_size_in_mid_epoch(tmp_path: Path) -> None:
    part = run(tmp_path, 1, *TINY, "max_steps=3")
    with pytest.raises(InputError, match="batch_size=100 cannot change in the middle of an epoch"):
        configure(f"resume={part.path}", "batch_size=100", f"outputs={tmp_path}")
