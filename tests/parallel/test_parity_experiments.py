"""Experiments of users' own kinds in every mode that carries them: the numbers of one process, in float64."""

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
from parity import assert_equal
from ways import tier
from worlds import MODES, Run, configure, run

from runner.distributed.backend import Backend
from runner.distributed.environment import RankInfo
from runner.distributed.world import World
from runner.errors import InputError
from runner.training.build import build

OWN = f"--config-dir={Path(__file__).parent / 'own'}"
COMMON = (OWN, "precision=fp64", "optimizer.lr=0.05", "epochs=9", "max_steps=10", "logger=none", "batch_size=14")
GPT = ("model=gpt", "model.dim=8", "model.depth=2", "model.heads=2", "model.dropout=0", "data=sentences")
FIGURES = ("model=two_heads", "data=figures")
SMOOTH = ("loss=cross_entropy", "loss.label_smoothing=0.1", "loss.weight=[1,2,3,4,5,6,7,8,9,10]")
DIGITS = ("data.sample_shape=[1,8,8]", "batch_size=350")  # the whole set in five steps, the last one of 37 samples
EXPERIMENTS = {
    "padded targets": (*GPT, "model.tied=false"),
    "tied embeddings": GPT,
    "class weights": ("model=mlp", "model.hidden=[16,16,16]", *DIGITS, *SMOOTH),
    "two heads": (*FIGURES, "loss=both_heads"),
    "own weight": (*FIGURES, "loss=large_ones"),
    "frozen": ("model=frozen", *DIGITS),
    "own objective": ("model=codes", "data=figures", "objective=reconstruction"),
    "two losses": ("model=codes", "data=figures", "objective=adversarial"),
}
SEVERAL_LOSSES = ("allreduce", "ddp", "fsdp", "none", "zero")
ONE_LOSS = (*SEVERAL_LOSSES, "ps")  # and tp, of a model with a plan
CARRIED = {"own objective": ONE_LOSS, "two losses": SEVERAL_LOSSES}
EXACT = [mode for mode in MODES if mode != "local_sgd"]
# Ranks and micro-batches: several of these on one rank, one on several ranks, and both at once, where some ranks have
# no sample of some micro-batches. dp is one process, and a parameter server is never alone.
WAYS = {"none": ((1, 3),), "dp": ((1, 1), (1, 3)), "ps": ((2, 1), (4, 3))}
# What the default run tests of it, and what CI tests besides: the other modes, and of one experiment all.
SLICE = [(name, mode, 2, 3) for name in EXPERIMENTS for mode in ("ddp", "fsdp", "pipeline", "ps")]
CELLS = [
    (name, mode, size, micro_batches)
    for name in EXPERIMENTS
    for mode in EXACT
    for size, micro_batches in WAYS.get(mode, ((1, 3), (2, 1), (4, 3)))
]


def is_thorough(name: str, mode: str, size: int, micro_batches: int) -> bool:
    return (size, micro_batches) == WAYS.get(mode, ((4, 3),))[-1] and (
        name == "padded targets" or mode not in {cell[1] for cell in SLICE}
    )


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Run]:
    @functools.cache
    def of(name: str) -> Run:
        return run(tmp_path_factory.mktemp("reference"), 1, *COMMON, *EXPERIMENTS[name])

    return of


@pytest.mark.filterwarnings("ignore:parallel=dp")
@pytest.mark.parametrize(
    ("name", "mode", "size", "micro_batches"),
    [
        pytest.param(*cell, id="-".join(map(str, cell)), marks=tier(cell in SLICE, is_thorough(*cell)))
        for cell in [*SLICE, *CELLS]
        if cell[1] in CARRIED.get(cell[0], EXACT)
    ],
)
def test_experiment_equals_one_process(
    name: str, mode: str, size: int, micro_batches: int, reference: Callable[[str], Run], tmp_path: Path
) -> None:
    words = (*COMMON, *EXPERIMENTS[name], f"parallel={mode}", f"micro_batches={micro_batches}")
    if mode == "pipeline":
        words = (*words, "parallel.micro_batches=1")  # the smallest share of a step has three samples
    assert_equal(run(tmp_path, size, *words), reference(name))


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_experiment_learns(name: str, reference: Callable[[str], Run]) -> None:
    losses = reference(name).losses
    assert min(losses[9], losses[10]) < losses[1]


@pytest.mark.parametrize("name", CARRIED)
@pytest.mark.parametrize("mode", [mode for mode in EXACT if mode not in ("none", "allreduce", "ddp", "fsdp", "zero")])
def test_mode_that_does_not_carry_it_names_those_that_do(name: str, mode: str, tmp_path: Path) -> None:
    if mode in CARRIED[name]:
        pytest.skip(f"{mode} carries it")
    words = (*COMMON, *EXPERIMENTS[name], f"parallel={mode}", f"outputs={tmp_path}")
    config, request = configure(*words)
    with pytest.raises(InputError, match=rf"parallel={mode}.*(try parallel=allreduce, parallel=ddp|tensor_plan)"):
        size = 1 if mode == "dp" else 2
        build(config, request.choices, World(RankInfo(0, 0, size, size), None, Backend()))
