"""Every mode gives the numbers of one process at every world size: in float64, which reveals every wrong formula."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import parity_table
import pytest
from mode_cases import mesh, tier
from parity import COMMON, EXPERIMENTS, assert_equal, distance
from worlds import MODES, Run, build_experiment, run

from runner.errors import InputError

MODELS = tuple(EXPERIMENTS)
# Additional overrides of the one process: pipeline splits a micro-batch into four, and BatchNorm sees each separately.
REFERENCE = {"parallel=pipeline": ("micro_batches=4",), "parallel.stage=2": ("micro_batches=4",)}


@dataclass(frozen=True)
class Row:
    """A mode with options.

    Attributes:
        error: How far its final weights may be from those of none, as a fraction of how far those moved.
        inexact_on: The world sizes with such an error; on others, the numbers must be equal.
    """

    name: str
    overrides: tuple[str, ...]
    world_sizes: tuple[int, ...] = (1, 2, 4)
    error: float = 0.0
    inexact_on: tuple[int, ...] = (1, 2, 4)


# A mode is in the matrix by having a YAML file. These are the modes whose defaults do not give the numbers of none:
INEXACT = {
    # Replicas step separately between averagings, each with the gradient of its own samples and, under BatchNorm, its
    # own statistics. In rounds of four steps of lr 0.01, most of that noise is averaged away.
    "local_sgd": Row("local_sgd", ("parallel=local_sgd",), error=0.2, inexact_on=(2, 4))
}
ROWS = [INEXACT.get(mode, Row(mode, (f"parallel={mode}",))) for mode in MODES] + [
    Row("fsdp 2 x 2", ("parallel=fsdp", "parallel.replicate=2"), (4,)),
    Row("tp 2 x 2, rest=fsdp", ("parallel=tp", "parallel.rest=fsdp"), (4,)),
    Row("tp 4", ("parallel=tp", "parallel.tensor=4"), (4,)),
    Row("pipeline 2 x 2", ("parallel=pipeline", "parallel.stages=2"), (4,)),
    Row("pipeline 4", ("parallel=pipeline", "parallel.stages=4"), (4,)),
    *(
        Row(f"mesh {axes}".replace("=", " "), mesh(axes)[1], (mesh(axes)[0],))
        for axes in ("shard=2 tensor=2", "shard=2 stage=2", "stage=2 tensor=2", "shard=2 stage=2 tensor=2")
    ),
    # Each rank rounds its gradients to a relative 2^-11 or 2^-8, and their sum is rounded once more: 2 epsilon
    # of each step's update. The effect on later gradients adds less than as much again in ten steps.
    Row("ddp fp16", ("parallel=ddp", "parallel.comm_hook=fp16"), (2,), error=4 * 2**-11),
    Row("ddp bf16", ("parallel=ddp", "parallel.comm_hook=bf16"), (2,), error=4 * 2**-8),
    # Each of three trainers updates the weights from which the others' gradients were computed, and momentum decays
    # three times a step: the weights move less far, but in the same direction.
    Row("ps async", ("parallel=ps", "parallel.updates=async"), (4,), error=1.0),
]
# Cells that must be refused: none and dp are one process by definition, a parameter server needs a trainer, toy's
# hidden layer of 10 cannot be sharded over 4 ranks, and these models have fewer than 4 stages.
REFUSED = {
    *((mode, model, world_size) for mode in ("none", "dp") for model in MODELS for world_size in (2, 4)),
    *(("ps", model, 1) for model in MODELS),
    ("tp 4", "toy", 4),
    *(("pipeline 4", model, 4) for model in ("toy", "mlp", "convnet")),
}
CELLS = [(row, model, world_size) for row in ROWS for model in MODELS for world_size in row.world_sizes]
# The default tier has every mode, on two ranks if it supports several, and all refused cells.
DEFAULT = {(mode, "mlp", 1 if mode in ("none", "dp") else 2) for mode in MODES} | REFUSED


def is_thorough(row: Row, model: str, world_size: int) -> bool:
    """Return True for the cells of CI: those with two axes, and others of only one world size, with BatchNorm."""
    if row.name in ("tp 4", "pipeline 4", "ddp bf16") or row.name.startswith("mesh"):  # test_mesh.py
        return False
    return model == "convnet" and (len(row.world_sizes) == 1 or (row.name, world_size) == ("tp", 4))


@pytest.mark.filterwarnings("ignore:parallel=dp")
@pytest.mark.parametrize(
    ("row", "model", "world_size"),
    [
        pytest.param(
            *(row, model, size),
            id=f"{row.name}-{model}-{size}",
            marks=tier((row.name, model, size) in DEFAULT, is_thorough(row, model, size)),
        )
        for row, model, size in CELLS
    ],
)
def test_mode_equals_one_process(
    row: Row,
    model: str,
    world_size: int,
    one_process: Callable[..., Run],
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    overrides = (*EXPERIMENTS[model], *COMMON, *row.overrides)
    if (row.name, model, world_size) in REFUSED:
        with pytest.raises(InputError, match=r"^parallel"):
            build_experiment(*overrides, world_size=world_size)
        return
    split = [words for override, words in REFERENCE.items() if override in row.overrides]
    expected = one_process(*EXPERIMENTS[model], *COMMON, *(split[0] if split else ()))
    made = run(tmp_path, world_size, *overrides)
    weights = distance(made, expected, expected.weights)
    if row.error and world_size in row.inexact_on:
        # Only of trained parameters: BatchNorm's statistics are in other units.
        trained = [name for group in expected.state["optimizer"]["param_groups"] for name in group["params"]]
        start = one_process(*EXPERIMENTS[model], *COMMON, "max_steps=1", "optimizer.lr=1e-12")
        weights, moved = distance(made, expected, trained), distance(expected, start, trained)
        assert 1e-9 < weights < row.error * moved
        assert made.losses[10] < made.losses[1]
    else:
        assert_equal(made, expected)
    losses = max(abs(made.losses[step] - loss) for step, loss in expected.losses.items())
    record_property("parity", parity_table.Cell(row.name, model, world_size, weights, losses, row.error)._asdict())


@pytest.mark.parametrize(
    "options",
    [
        ("micro_batches=3", "clip_grad_norm=0.1", "scheduler=cosine", "scheduler.warmup_steps=3"),
        *(
            pytest.param(options, marks=pytest.mark.thorough)
            for options in (
                ("optimizer=adamw", "loader.num_workers=2", "loader.prefetch=3", "loader.drop_last=true"),
                ("loader.shuffle=false", "memory_format=contiguous"),
            )
        ),
    ],
    ids=lambda options: options[0],
)
def test_options_have_the_same_effect_on_two_ranks(
    options: tuple[str, ...], one_process: Callable[..., Run], tmp_path: Path
) -> None:
    # Adam divides a gradient by its size. The gradient of a bias before BatchNorm is zero except for rounding.
    overrides = (*EXPERIMENTS["toy" if "optimizer=adamw" in options else "convnet"], *COMMON)
    expected = one_process(*overrides, *options)
    assert_equal(run(tmp_path, 2, *overrides, *options, "parallel=ddp"), expected)
    assert expected.losses != one_process(*overrides).losses


@pytest.mark.thorough
@pytest.mark.parametrize("mode", ["allreduce", "zero", "fsdp"])
def test_fused_update_of_channels_last_parameters(mode: str, one_process: Callable[..., Run], tmp_path: Path) -> None:
    """On the CPU it iterates over memory, whatever the strides of parameter, gradient and state."""
    # Adam divides a gradient by its size: a large eps hides the noise of gradients that are zero except for rounding.
    options = ("memory_format=channels_last", "optimizer=adamw", "optimizer.eps=0.01")
    overrides = (*EXPERIMENTS["convnet"], *COMMON, *options)
    unfused = one_process(*overrides, "optimizer.fused=false")
    assert_equal(run(tmp_path, 2, *overrides, f"parallel={mode}"), unfused)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "options",
    [
        ("parallel.static_graph=true",),
        ("parallel.find_unused_parameters=true", "parallel.broadcast_buffers=false"),
        ("parallel.gradient_as_bucket_view=false", "parallel.bucket_cap_mb=0.001"),
    ],
    ids=lambda options: options[0],
)
def test_options_of_ddp_change_no_number(
    options: tuple[str, ...], one_process: Callable[..., Run], tmp_path: Path
) -> None:
    overrides = (*EXPERIMENTS["convnet"], *COMMON, "micro_batches=2")
    assert_equal(run(tmp_path, 2, *overrides, "parallel=ddp", *options), one_process(*overrides))


def test_unsynchronized_batch_norm_gives_other_numbers(one_process: Callable[..., Run], tmp_path: Path) -> None:
    """Without this test, the matrix would pass if synchronization had no effect at all."""
    overrides = (*EXPERIMENTS["convnet"], *COMMON)
    separate = run(tmp_path, 2, *overrides, "parallel=ddp", "sync_batchnorm=false")
    assert separate.losses[1] != pytest.approx(one_process(*overrides).losses[1], rel=1e-6)


def test_fp32_agrees_over_the_first_steps(tmp_path: Path) -> None:
    overrides = (*EXPERIMENTS["convnet"], "optimizer.lr=0.01", "max_steps=5", "logger=none")
    one, two = run(tmp_path / "1", 1, *overrides), run(tmp_path / "2", 2, *overrides, "parallel=ddp")
    for step in range(1, 6):
        assert two.losses[step] == pytest.approx(one.losses[step], rel=1e-4)


@pytest.mark.fault("a rank without a sample", outcome="survived")
@pytest.mark.parametrize("mode", [pytest.param("ddp", marks=pytest.mark.thorough), "fsdp"])
def test_last_batch_may_leave_ranks_without_samples(mode: str, one_process: Callable[..., Run], tmp_path: Path) -> None:
    """33 samples in batches of 16: the third step has one sample for all ranks and two micro-batches."""
    overrides = ("model=toy", "data=toy", "data.num_train=33", "batch_size=16", "micro_batches=2", *COMMON)
    overrides = (*overrides, "max_steps=4")
    made = run(tmp_path, 2, *overrides, f"parallel={mode}")
    assert made.losses == pytest.approx(one_process(*overrides).losses, rel=1e-9)


@pytest.mark.parametrize(
    "options",
    [("parallel=ddp",), ("parallel=ddp", "activation_checkpointing=full"), ("parallel=fsdp",), ("parallel=tp",)],
    ids=" ".join,
)
def test_a_rank_without_samples_runs_batch_norm_and_attention(
    options: tuple[str, ...], one_process: Callable[..., Run], tmp_path: Path
) -> None:
    """torch's attention cannot be called without samples, and BatchNorm must not count the one that stands in."""
    overrides = (
        *("model=linear", "model._target_=fuzz_parts.Net", "+model.parts=[norm_act,block]", "+model.reader=encoder"),
        *("data=toy", "data._target_=fuzz_parts.Sequences", "data.sample_shape=[3,10]", "data.num_train=10"),
        *("batch_size=4", "max_steps=4", *COMMON),
    )
    assert_equal(run(tmp_path, 4 if "tp" in options[0] else 3, *overrides, *options), one_process(*overrides))
