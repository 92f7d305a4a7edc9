"""A run that goes on after its last checkpoint: it ends at the weights of a run left alone, in every mode."""

import shutil
from pathlib import Path

import pytest
import torch
from ranks import RankError
from worlds import MODES, configure, run

from runner.errors import InputError
from runner.runs.train_state import available

TINY = ("model=mlp", "model.hidden=[16]", "data.sample_shape=[1,8,8]", "batch_size=200", "logger=none")
ALONE = ("none", "dp")
WAYS = [
    *((f"parallel={mode}",) for mode in MODES),
    ("parallel=ddp", "parallel.static_graph=true"),
    ("parallel=ddp", "parallel.find_unused_parameters=true"),
    ("parallel=ddp", "parallel.bucket_cap_mb=0.001"),
    ("parallel=ddp", "parallel.comm_hook=fp16"),
    ("parallel=ddp", "micro_batches=2"),
    ("parallel=fsdp", "parallel.replicate=2"),
    ("parallel=tp", "parallel.rest=fsdp"),
    ("parallel=pipeline", "parallel.stages=2"),
]
SLICE = [
    pytest.param((f"parallel={mode}",), 1 if mode in ALONE else 2, id=f"{mode}-{1 if mode in ALONE else 2}")
    for mode in MODES
]
ON_FOUR = [
    pytest.param(words, 4, id=f"{' '.join(words)}-4", marks=pytest.mark.thorough)
    for words in WAYS
    if words[0].removeprefix("parallel=") not in ALONE
]


@pytest.mark.fault("the end of all ranks, in every mode", outcome="survived")
@pytest.mark.filterwarnings("ignore:parallel=dp")
@pytest.mark.parametrize(("words", "world_size"), [*SLICE, *ON_FOUR])
def test_it_ends_at_the_same_weights_to_the_bit(words: tuple[str, ...], world_size: int, tmp_path: Path) -> None:
    """In float32, whose rounding tells in which order the ranks were summed, on four: two have one order only."""
    layers = ("model.hidden=[32,16,16]", "model.batch_norm=true", "model.dropout=0.2")
    steps = ("epochs=3", "scheduler=cosine", "checkpoint.every_steps=4", "checkpoint.keep=9")
    whole = run(tmp_path, world_size, *TINY, *layers, *steps, "optimizer=adamw", *words)
    weights, losses = whole.result["weights_sha256"], whole.losses
    kept = available(whole.path / "checkpoints")
    for path in kept[3:]:
        shutil.rmtree(path)
    assert kept[2].name == "step_12"  # the middle of the second epoch
    resumed = run(tmp_path, world_size, f"resume={whole.path}")
    assert resumed.path == whole.path
    assert "resuming after step 12" in (whole.path / "log.txt").read_text()
    assert [path.name for path in available(whole.path / "checkpoints")] == [path.name for path in kept]
    assert resumed.losses == losses
    assert resumed.result["weights_sha256"] == weights


def test_a_run_that_is_resumed_at_its_end_has_the_metrics_of_one_left_alone(tmp_path: Path) -> None:
    """As one that was killed between its last checkpoint and its last evaluation."""
    whole = run(tmp_path, 1, *TINY, "epochs=1")
    metrics = whole.result["metrics"]
    assert "train/loss" in metrics
    assert run(tmp_path, 1, f"resume={whole.path}").result["metrics"] == metrics


@pytest.mark.fault("another number of ranks after each stop", outcome="survived")
def test_resumed_on_another_number_of_ranks_it_reads_the_same_batches(tmp_path: Path) -> None:
    words = (*TINY, "precision=fp64", "optimizer.lr=0.01")
    whole = run(tmp_path / "whole", 1, *words, "max_steps=20")
    part = run(tmp_path / "part", 4, *words, "max_steps=6", "parallel=ddp")
    out = f"outputs={tmp_path / 'part'}"
    run(tmp_path / "part", 2, f"resume={part.path}", out, "max_steps=13", "parallel=allreduce")
    run(tmp_path / "part", 1, f"resume={part.path}", out, "max_steps=20", "parallel=none")
    assert part.losses == pytest.approx(whole.losses, rel=1e-9)
    for name, tensor in whole.weights.items():
        torch.testing.assert_close(part.weights[name], tensor, rtol=1e-9, atol=1e-9)


def test_a_changed_learning_rate_holds_after_resuming(tmp_path: Path) -> None:
    part = run(tmp_path, 1, *TINY, "max_steps=2", "optimizer.momentum=0.5")
    run(tmp_path, 1, f"resume={part.path}", f"outputs={tmp_path}", "max_steps=4", "optimizer.lr=0.25")
    assert [line.get("train/learning_rate") for line in part.lines if "train/loss" in line] == [0.05, 0.05, 0.25, 0.25]
    assert part.state["optimizer"]["param_groups"][0]["momentum"] == 0.5


@pytest.mark.fault("the newest checkpoint damaged", outcome="survived")
def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(tmp_path: Path) -> None:
    words = (*TINY, "epochs=2", "checkpoint.every_steps=5")
    whole = run(tmp_path / "whole", 1, *words)
    folder = whole.path / "checkpoints"
    step_15 = (folder / "step_15").stat().st_ino

    def hurt_progress(text: str) -> None:
        (folder / "step_16" / "progress.json").write_text(text)

    progress = (folder / "step_16" / "progress.json").read_text()
    for named, hurt in {
        "step_16/rank_0.safetensors": lambda: (folder / "step_16" / "rank_0.safetensors").write_bytes(b""),
        "step_16/progress.json": lambda: hurt_progress(progress.replace('"batch_size": 200', '"batch_size": 300')),
        "step_16/progress.json is": lambda: (folder / "step_16" / "progress.json").unlink(),
        "step_99/manifest.json": lambda: (folder / "step_99").mkdir(),
    }.items():
        before = (whole.path / "log.txt").read_text()
        hurt()
        run(tmp_path / "whole", 1, f"resume={whole.path}", f"outputs={tmp_path / 'whole'}")
        said = (whole.path / "log.txt").read_text().removeprefix(before)
        assert named in said and "damaged; trying the one before it" in said
        assert ("resuming after step 15" in said) == ("step_16" in named)
        assert whole.result["state"] == "finished" and len(set(whole.losses)) == 16
        shutil.rmtree(folder / "step_99", ignore_errors=True)
        assert (folder / "step_15").stat().st_ino == step_15
    (folder / "step_16" / "rank_0.safetensors").write_bytes(b"")
    (folder / "step_15" / "rank_0.safetensors").unlink()
    with pytest.raises(InputError, match=r"holds no sound checkpoint: .*step_16/rank_0.safetensors is not what was"):
        configure(f"resume={whole.path}", f"outputs={tmp_path / 'whole'}")
    assert (folder / "step_16").exists() and whole.result["state"] == "finished"


def test_where_no_checkpoint_is_sound_the_run_does_not_start_afresh(tmp_path: Path) -> None:
    """Of which a first look, at sizes alone, has not told."""
    done = run(tmp_path, 1, *TINY, "max_steps=2")
    file = done.path / "checkpoints" / "step_2" / "rank_0.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(RankError, match="no sound checkpoint"):
        run(tmp_path, 1, f"resume={done.path}", f"outputs={tmp_path}")
    assert [path.name for path in available(done.path / "checkpoints")] == ["step_2"]


def test_resume_refuses_another_batch_size_in_mid_epoch(tmp_path: Path) -> None:
    part = run(tmp_path, 1, *TINY, "max_steps=3")
    with pytest.raises(InputError, match="batch_size=100 cannot change in the middle of an epoch"):
        configure(f"resume={part.path}", "batch_size=100", f"outputs={tmp_path}")
