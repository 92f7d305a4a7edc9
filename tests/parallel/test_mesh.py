"""parallel=mesh: combined axes give the numbers of one process, and checkpoints move between meshes and other modes."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from mode_cases import mesh
from parity import COMMON, EXPERIMENTS, assert_equal
from worlds import Run, build_experiment, run

from runner.checkpoints.saved_state import weights_sha256
from runner.errors import InputError
from runner.parallel.mesh import Mesh
from runner.training.mode import Axes

OWN = f"--config-dir={Path(__file__).parent / 'own'}"
STEPS = ("precision=fp64", "optimizer.lr=0.05", "epochs=9", "max_steps=6", "logger=none")
# Targets are ignored where a sentence is padded, the embedding is tied to the head, and the last batch is uneven.
GPT = (OWN, "model=gpt", "model.dim=8", "model.depth=2", "model.heads=2", "data=sentences", "batch_size=14", *STEPS)
OFTEN = ("clip_grad_norm=0.1", "ema.decay=0.8", "eval_every_steps=2")
DROPOUT = (*GPT, "model.dropout=0.2", *OFTEN)
# Pairs of sharded layers are in different stages.
MLP = ("model=mlp", "model.hidden=[16,12,10]", "model.batch_norm=true", "model.dropout=0.3", "optimizer=adamw")
DIGITS = ("data.sample_shape=[1,8,8]", "batch_size=350", *STEPS, *OFTEN, "optimizer.eps=0.01")
WEIGHTED = (*MLP, *DIGITS, "loss=cross_entropy", "loss.weight=[1,2,3,4,5,6,7,8,9,10]")
CONVNET = (*EXPERIMENTS["convnet"], *COMMON, "micro_batches=2")
TRANSFORMER = (*EXPERIMENTS["transformer"], *COMMON, "activation_checkpointing=full")
# Ranks, and with one sample in the last step of an epoch also pipelines, lack samples of a micro-batch.
FEW = ("model=mlp", "model.hidden=[12,10]", "data=toy", "data.num_train=33", "data.num_val=3", "batch_size=16", *COMMON)


@pytest.mark.parametrize(
    ("axes", "experiment"),
    [
        ("shard=2 tensor=2", FEW),
        pytest.param("shard=2 stage=2", DROPOUT, marks=pytest.mark.thorough),
        ("tensor=2 stage=2", WEIGHTED),
        pytest.param("shard=2 tensor=2", DROPOUT, marks=pytest.mark.soak),
        pytest.param("tensor=2 stage=2", FEW, marks=pytest.mark.soak),
        pytest.param("replicate=2 tensor=2", WEIGHTED, marks=pytest.mark.thorough),
        pytest.param("replicate=2 stage=2", FEW, marks=pytest.mark.thorough),
        pytest.param("shard=2 stage=2", CONVNET, marks=pytest.mark.soak),
        pytest.param("shard=2 stage=2 schedule=ZBV", (*DROPOUT, "model.tied=false"), marks=pytest.mark.thorough),
        pytest.param("shard=2 tensor=2", TRANSFORMER, marks=pytest.mark.thorough),
        pytest.param("replicate=2 shard=2 tensor=2", FEW, marks=pytest.mark.soak),
        pytest.param("replicate=2 shard=2 tensor=2", TRANSFORMER, marks=pytest.mark.soak),
        pytest.param("shard=2 tensor=2 stage=2", TRANSFORMER, marks=pytest.mark.soak),
        pytest.param("shard=2 tensor=2 stage=2", DROPOUT, marks=pytest.mark.thorough),
    ],
)
def test_mesh_equals_one_process(
    axes: str, experiment: tuple[str, ...], one_process: Callable[..., Run], tmp_path: Path
) -> None:
    split = ("parallel.micro_batches=2",) if "stage" in axes else ()
    count = 2 * (2 if "micro_batches=2" in experiment else 1) if "stage" in axes else 1
    expected = one_process(*experiment, *([f"micro_batches={count}"] if split else []))
    size, overrides = mesh(axes)
    made = run(tmp_path, size, *experiment, *overrides, *split)
    assert_equal(made, expected)
    assert made.result["weights_sha256"] == weights_sha256(made.weights)  # also gathered, not only saved, correctly
    average = made.state.get("average", {})
    assert average.keys() == expected.state.get("average", {}).keys()
    for name, tensor in average.items():
        assert (tensor - expected.state["average"][name]).abs().max() < 1e-9, name


@pytest.mark.parametrize(
    ("first", "second", "last"),
    [
        pytest.param("shard=2 stage=2", (1, ("parallel=none",)), "shard=2 tensor=2", marks=pytest.mark.thorough),
        pytest.param(
            *("shard=2 tensor=2 stage=2", (2, ("parallel=fsdp",)), "shard=2 tensor=2 stage=2"), marks=pytest.mark.soak
        ),
    ],
)
def test_checkpoint_moves_between_meshes(
    first: str, second: tuple[int, tuple[str, ...]], last: str, one_process: Callable[..., Run], tmp_path: Path
) -> None:
    overrides = (*GPT, *OFTEN, "optimizer=adamw", "optimizer.eps=0.01")
    expected = one_process(*overrides)
    size, words = mesh(first)
    made = run(tmp_path, size, *overrides, *words, "max_steps=2")
    run(tmp_path, second[0], f"resume={made.path}", *second[1], "max_steps=3")
    run(tmp_path, 1, f"resume={made.path}", "parallel=none", "max_steps=4")
    size, words = mesh(last)
    run(tmp_path, size, f"resume={made.path}", *words, "max_steps=6")
    assert_equal(made, expected)


def test_pipelines_share_shards_when_only_one_of_them_gets_larger_micro_batches(
    one_process: Callable[..., Run], tmp_path: Path
) -> None:
    """Steps of 12 and 15 samples after an evaluation, which leaves the weights gathered."""
    overrides = ("model=mlp", "model.hidden=[12,10]", "data=toy", "data.num_train=27", "batch_size=15", *COMMON)
    overrides = (*overrides, "micro_batches=3", "max_steps=4")
    made = run(tmp_path, 1, *overrides, "max_steps=1")
    size, words = mesh("shard=2 stage=2")
    run(tmp_path, size, f"resume={made.path}", *words, "parallel.micro_batches=2", "max_steps=4")
    assert_equal(made, one_process(*overrides))


def test_one_axis_is_computed_and_the_single_modes_are_corners() -> None:
    assert Mesh(replicate=2, tensor=2).axes(8) == Axes(replicate=2, shard=2, tensor=2)
    assert Mesh(shard=1, stage=None).axes(2) == Axes(stage=2, micro_batches=4)
    assert Mesh(shard=1, replicate=None).axes(1) == Axes()
    two, four = Mesh(tensor=2).at(2), Mesh(tensor=2).at(4)
    assert two.resolved_axes == Axes(tensor=2)
    assert (two.supported_objectives, two.meta_init) == ("one_loss", False)
    assert (four.supported_objectives, four.meta_init) == ("one_loss", True)  # no rank materializes the model


@pytest.mark.parametrize(
    ("axes", "options", "message"),
    [
        ("tensor=3", (), "parallel.tensor=3 must divide the world of 4 ranks; try 2 or 4"),
        ("tensor=2 stage=4", (), "parallel.stage=4 x parallel.tensor=2 must divide the number of ranks, 4; start 8"),
        ("tensor=2 shard=1", (), "parallel.tensor=2 must equal the number of ranks, 4; start 2"),
        ("replicate=null", (), "parallel.replicate=null and parallel.shard=null: only one axis can be computed"),
        ("schedule=1F1B", (), "parallel.schedule=1F1B has no effect without a pipeline; try parallel.stage=2"),
        ("stage=2 schedule=DualPipeV micro_batches=2", (), "parallel.micro_batches=2 must be at least 4"),
        ("stage=4", (), "parallel.stage=4 x 1 per rank must be at most 3"),
        ("stage=2", ("compile=true",), "compile=true compiles a whole model, which no rank of parallel.stage=2 has"),
        ("stage=2", ("model=unet", "data=shapes"), "parallel.stage=2 needs a model that offers its stages()"),
        ("tensor=2", ("model=unet", "data=shapes"), "parallel.tensor=2 needs a model with tensor_plan()"),
        ("stage=2 schedule=ZBV", (*GPT, "model.depth=4"), "two stages of a rank may share embed.weight"),
        (
            "tensor=2",
            (OWN, "model=codes", "data=figures", "objective=adversarial"),
            "has 2 losses, which parallel",
        ),
    ],
)
def test_unsupported_combinations_are_refused(axes: str, options: tuple[str, ...], message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        build_experiment(*options, *mesh(axes)[1], world_size=4)
