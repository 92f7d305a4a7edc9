"""Custom kinds of experiments in every mode that supports them: the numbers of one process, in float64."""

from collections.abc import Callable
from pathlib import Path

import pytest
from mode_cases import tier
from parity import assert_equal
from worlds import MODES, Run, build_experiment, run

from runner.errors import InputError

CUSTOM = f"--config-dir={Path(__file__).parent / 'own'}"
COMMON = (CUSTOM, "precision=fp64", "optimizer.lr=0.05", "epochs=9", "max_steps=10", "logger=none", "batch_size=14")
GPT = ("model=gpt", "model.dim=8", "model.depth=2", "model.heads=2", "model.dropout=0", "data=sentences")
FIGURES = ("model=two_heads", "data=figures")
MLP = ("model=mlp", "model.hidden=[16,16,16]")
SMOOTH = ("loss=cross_entropy", "loss.label_smoothing=0.1", "loss.weight=[1,2,3,4,5,6,7,8,9,10]")
DIGITS = ("data.sample_shape=[1,8,8]", "batch_size=350")  # an epoch has five steps, the last one of 37 samples
EXPERIMENTS = {
    "padded targets": (*GPT, "model.tied=false"),
    "tied embeddings": GPT,
    "class weights": (*MLP, *DIGITS, *SMOOTH),
    "transforms": (*MLP, *DIGITS, "transforms=[flip_crop,colors]", "transforms.crop.padding=1"),
    "two heads": (*FIGURES, "loss=both_heads"),
    "custom weight": (*FIGURES, "loss=large_ones"),
    "frozen": ("model=frozen", *DIGITS),
    "custom objective": ("model=codes", "data=figures", "objective=reconstruction"),
    "two losses": ("model=codes", "data=figures", "objective=adversarial"),
}
SEVERAL_LOSSES = ("allreduce", "ddp", "fsdp", "none", "zero")
ONE_LOSS = (*SEVERAL_LOSSES, "ps")  # and tp, for a model with a plan
SUPPORTED = {"custom objective": ONE_LOSS, "two losses": SEVERAL_LOSSES}
EXACT = [mode for mode in MODES if mode != "local_sgd"]
# Ranks and micro-batches: several micro-batches on one rank, one on several ranks, and both, where some ranks have no
# sample of some micro-batches. dp is one process, and a parameter server needs a trainer.
SIZES = {"none": ((1, 3),), "dp": ((1, 1), (1, 3)), "ps": ((2, 1), (4, 3))}
ON_TWO_RANKS = [(name, mode, 2, 3) for name in EXPERIMENTS for mode in ("ddp", "fsdp", "pipeline", "ps")]
# The default tier has ddp with each experiment, and each other mode with those that differ most for it.
MORE_BY_DEFAULT = {
    "fsdp": ("tied embeddings", "frozen", "two losses"),
    "pipeline": ("padded targets", "tied embeddings", "two heads"),
    "ps": ("padded targets", "two heads", "custom objective"),
}
CELLS = [
    (name, mode, size, micro_batches)
    for name in EXPERIMENTS
    for mode in EXACT
    for size, micro_batches in SIZES.get(mode, ((1, 3), (2, 1), (4, 3)))
]


def is_default(name: str, mode: str, size: int, micro_batches: int) -> bool:
    on_two = (name, mode, size, micro_batches) in ON_TWO_RANKS
    return on_two and (mode == "ddp" or name in MORE_BY_DEFAULT[mode])


def is_thorough(name: str, mode: str, size: int, micro_batches: int) -> bool:
    return (size, micro_batches) == SIZES.get(mode, ((4, 3),))[-1] and name in ("padded targets", "two losses")


@pytest.mark.filterwarnings("ignore:parallel=dp")
@pytest.mark.parametrize(
    ("name", "mode", "size", "micro_batches"),
    [
        pytest.param(*cell, id="-".join(map(str, cell)), marks=tier(is_default(*cell), is_thorough(*cell)))
        for cell in [*ON_TWO_RANKS, *CELLS]
        if cell[1] in SUPPORTED.get(cell[0], EXACT)
    ],
)
def test_experiment_equals_one_process(
    name: str, mode: str, size: int, micro_batches: int, one_process: Callable[..., Run], tmp_path: Path
) -> None:
    overrides = (*COMMON, *EXPERIMENTS[name], f"parallel={mode}", f"micro_batches={micro_batches}")
    if mode == "pipeline":
        overrides = (*overrides, "parallel.micro_batches=1")  # the smallest part of a step has three samples
    assert_equal(run(tmp_path, size, *overrides), one_process(*COMMON, *EXPERIMENTS[name]))


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_experiment_learns(name: str, one_process: Callable[..., Run]) -> None:
    losses = one_process(*COMMON, *EXPERIMENTS[name]).losses
    assert min(losses[9], losses[10]) < losses[1]


@pytest.mark.parametrize(
    ("name", "mode"), [(name, mode) for name, modes in SUPPORTED.items() for mode in EXACT if mode not in modes]
)
def test_unsupported_objective_names_the_modes_that_support_it(name: str, mode: str, tmp_path: Path) -> None:
    overrides = (*COMMON, *EXPERIMENTS[name], f"parallel={mode}", f"outputs={tmp_path}")
    with pytest.raises(InputError, match=rf"parallel={mode}.*(try parallel=ddp|tensor_plan)"):
        build_experiment(*overrides, world_size=1 if mode == "dp" else 2)
