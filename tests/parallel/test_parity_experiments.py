"""Custom kinds of experiments in every mode that supports them: the numbers of one process, in float64."""

from collections.abc import Callable
from pathlib import Path

import pytest
from mode_cases import tier
from parity import assert_equal
from worlds import MODES, Run, run

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
    "transforms": (*MLP, *DIGITS, "batch_size=50", "transforms=[flip_crop,colors]", "transforms.crop.padding=1"),
    "two heads": (*FIGURES, "loss=both_heads"),
    "custom weight": (*FIGURES, "loss=large_ones"),
    "custom objective": ("model=codes", "data=figures", "objective=reconstruction"),
    "two losses": ("model=codes", "data=figures", "objective=adversarial"),
}
SEVERAL_LOSSES = ("allreduce", "ddp", "fsdp", "none", "zero")
ONE_LOSS = (*SEVERAL_LOSSES, "ps")  # and tp, for a model with a plan
SUPPORTED = {"custom objective": ONE_LOSS, "two losses": SEVERAL_LOSSES}
EXACT = [mode for mode in MODES if mode != "local_sgd"]
# Ranks and micro-batches: several on one rank, and several on several ranks, where some ranks have no sample of some
# micro-batches. dp is one process, and a parameter server needs a trainer.
SIZES = {"none": ((1, 3),), "dp": ((1, 3),), "ps": ((2, 3), (4, 3))}
CELLS = [
    (name, mode, size, micro_batches)
    for name in EXPERIMENTS
    for mode in EXACT
    for size, micro_batches in SIZES.get(mode, ((2, 3), (1, 3), (4, 3)))
    if mode in SUPPORTED.get(name, EXACT)
]
# The default tier has each experiment once, and CI also the modes that differ most for it.
DEFAULT = {
    "ddp": ("padded targets", "class weights", "transforms", "custom weight", "two losses"),
    "fsdp": ("tied embeddings",),
    "pipeline": ("two heads",),
    "ps": ("custom objective",),
}
THOROUGH = {
    "fsdp": ("two losses",),
    "tp": ("padded targets",),
    "pipeline": ("padded targets", "tied embeddings"),
    "ps": ("padded targets",),
}


def tiers(name: str, mode: str, size: int, micro_batches: int) -> tuple[pytest.MarkDecorator, ...]:
    """Return the marks of a cell."""
    is_first = size == SIZES.get(mode, ((2, 3),))[0][0]
    return tier(is_first and name in DEFAULT.get(mode, ()), is_first and name in THOROUGH.get(mode, ()))


@pytest.mark.filterwarnings("ignore:parallel=dp")
@pytest.mark.parametrize(
    ("name", "mode", "size", "micro_batches"),
    [pytest.param(*cell, id="-".join(map(str, cell)), marks=tiers(*cell)) for cell in CELLS],
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
