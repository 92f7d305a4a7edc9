"""Every mode, at every world size, gives the numbers of one process: in float64, where no wrong formula can hide."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import parity_table
import pytest
from parity import COMMON, EXPERIMENTS, assert_equal, distance
from ways import tier
from worlds import MODES, Run, configure, run

from runner.distributed.backend import Backend
from runner.distributed.environment import RankInfo
from runner.distributed.world import World
from runner.errors import InputError
from runner.training.build import build

MODELS = tuple(EXPERIMENTS)
# What the one process is told besides: pipeline cuts a micro-batch into four, and BatchNorm sees each by itself.
REFERENCE = {"pipeline": ("micro_batches=4",)}


@dataclass(frozen=True)
class Way:
    """A mode with options; `miss` is how far its weights may end from none's, as a share of how far those moved."""

    name: str
    words: tuple[str, ...]
    world_sizes: tuple[int, ...] = (1, 2, 4)
    miss: float = 0.0
    misses_on: tuple[int, ...] = (1, 2, 4)


# A mode is in the matrix by having a YAML file. Where its defaults do not give none's numbers:
LOSSY = {
    # Replicas step alone between averagings, each by its own samples' gradient and, under BatchNorm, statistics; what
    # these have of noise is averaged away and bends the way little in rounds of four steps of lr 0.01.
    "local_sgd": Way("local_sgd", ("parallel=local_sgd",), miss=0.2, misses_on=(2, 4)),
}
WAYS = [LOSSY.get(mode, Way(mode, (f"parallel={mode}",))) for mode in MODES] + [
    Way("fsdp 2 x 2", ("parallel=fsdp", "parallel.replicate=2"), (4,)),
    Way("tp 2 x 2, rest=fsdp", ("parallel=tp", "parallel.rest=fsdp"), (4,)),
    Way("tp 4", ("parallel=tp", "parallel.tensor=4"), (4,)),
    Way("pipeline 2 x 2", ("parallel=pipeline", "parallel.stages=2"), (4,)),
    Way("pipeline 4", ("parallel=pipeline", "parallel.stages=4"), (4,)),
    # Gradients are rounded to a relative 2^-11 or 2^-8 by each rank, and their sum once more; test_comm_hooks.py.
    Way("ddp fp16", ("parallel=ddp", "parallel.comm_hook=fp16"), (2,), miss=4 * 2**-11),
    Way("ddp bf16", ("parallel=ddp", "parallel.comm_hook=bf16"), (2,), miss=4 * 2**-8),
    # Of ten steps the last eight send a matrix of rank 1 for each layer, and at worst all of their move comes late.
    Way("ddp powersgd", ("parallel=ddp", "parallel.comm_hook=powersgd"), (2,), miss=0.8),
    # Each of three trainers' updates moves the weights at which the others' gradients were taken, and momentum forgets
    # by the update, three times a step: the way is shorter, but not turned round. test_ps.py has it without momentum.
    Way("ps async", ("parallel=ps", "parallel.updates=async"), (4,), miss=1.0),
]
# What may be absent from the matrix, by name; each is refused. None and dp are one process by definition, a parameter
# server is never alone, toy's hidden layer of 10 cannot be cut in 4, and these models have fewer stages than 4.
ABSENT = {
    *((mode, model, world_size) for mode in ("none", "dp") for model in MODELS for world_size in (2, 4)),
    *(("ps", model, 1) for model in MODELS),
    ("tp 4", "toy", 4),
    *(("pipeline 4", model, 4) for model in ("toy", "mlp", "convnet")),
}
CELLS = [(way, model, world_size) for way in WAYS for model in MODELS for world_size in way.world_sizes]
# What the default run tests of it: every mode, on two ranks where it may have two; and what is refused.
SLICE = {(mode, "mlp", 1 if mode in ("none", "dp") else 2) for mode in MODES} | ABSENT
# What CI tests besides of every way: four ranks with a model that has BatchNorm, two with one without, and one rank.
THOROUGH = {("convnet", 4), ("transformer", 2), ("mlp", 1)}


def is_only(way: Way, model: str) -> bool:
    """Of a way on one number of ranks: the model that it is tested with."""
    return len(way.world_sizes) == 1 and model == ("transformer" if way.name == "pipeline 4" else "convnet")


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Run]:
    @functools.cache
    def of(model: str, *options: str) -> Run:
        return run(tmp_path_factory.mktemp(model), 1, *EXPERIMENTS[model], *COMMON, *options)

    return of


@pytest.mark.filterwarnings("ignore:parallel=dp")
@pytest.mark.parametrize(
    ("way", "model", "world_size"),
    [
        pytest.param(
            *(way, model, world_size),
            id=f"{way.name}-{model}-{world_size}",
            marks=tier((way.name, model, world_size) in SLICE, (model, world_size) in THOROUGH or is_only(way, model)),
        )
        for way, model, world_size in CELLS
    ],
)
def test_mode_equals_one_process(
    way: Way,
    model: str,
    world_size: int,
    reference: Callable[..., Run],
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    words = (*EXPERIMENTS[model], *COMMON, *way.words)
    if (way.name, model, world_size) in ABSENT:
        config, request = configure(*words)
        with pytest.raises(InputError, match=r"^parallel"):
            build(config, request.choices, World(RankInfo(0, 0, world_size, world_size), None, Backend()))
        return
    mode = way.words[0].removeprefix("parallel=")
    expected = reference(model, *REFERENCE.get(mode, ()))
    spread = run(tmp_path, world_size, *words)
    weights = distance(spread, expected, expected.weights)
    if way.miss and world_size in way.misses_on:
        # Of what is trained: BatchNorm's statistics follow, in units of their own.
        trained = [name for group in expected.state["optimizer"]["param_groups"] for name in group["params"]]
        start = reference(model, "max_steps=1", "optimizer.lr=1e-12")
        weights, gone = distance(spread, expected, trained), distance(expected, start, trained)
        assert 1e-9 < weights < way.miss * gone
        assert spread.losses[10] < spread.losses[1]
    else:
        assert_equal(spread, expected)
    losses = max(abs(spread.losses[step] - loss) for step, loss in expected.losses.items())
    record_property("parity", parity_table.Cell(way.name, model, world_size, weights, losses, way.miss)._asdict())


@pytest.mark.parametrize(
    "options",
    [
        ("micro_batches=3",),
        ("clip_grad_norm=0.1",),
        ("scheduler=cosine", "scheduler.warmup_steps=3"),
        ("optimizer=adamw",),
        ("loader.num_workers=2", "loader.prefetch=3"),
        ("loader.drop_last=true",),
        ("loader.shuffle=false", "memory_format=contiguous"),
    ],
    ids=lambda options: options[0],
)
@pytest.mark.parametrize("mode", ["ddp", pytest.param("allreduce", marks=pytest.mark.soak)])
def test_option_means_the_same_on_two_ranks(
    mode: str, options: tuple[str, ...], reference: Callable[..., Run], tmp_path: Path
) -> None:
    # Adam divides a gradient by its size. That of a bias before a BatchNorm is zero but for its rounding: noise.
    model = "toy" if "optimizer=adamw" in options else "convnet"
    expected = reference(model, *options)
    assert_equal(run(tmp_path, 2, *EXPERIMENTS[model], *COMMON, *options, f"parallel={mode}"), expected)
    # The option does something: the run without it ends elsewhere. Where samples are read, alone, does not count.
    changes = options[0] not in ("loader.num_workers=2",)
    assert (expected.losses != reference(model).losses) == changes


@pytest.mark.parametrize(
    "mode",
    [
        "none",
        "allreduce",
        *(pytest.param(mode, marks=pytest.mark.thorough) for mode in ("ddp", "zero", "fsdp", "pipeline")),
    ],
)
def test_a_fused_update_means_the_same_where_parameters_are_channels_last(
    mode: str, reference: Callable[..., Run], tmp_path: Path
) -> None:
    """On the CPU it goes through memory, whatever the strides of parameter, gradient and state."""
    # Adam divides a gradient by its size: a large eps hides the noise of those that are zero but for their rounding.
    words = ("memory_format=channels_last", "optimizer=adamw", "optimizer.eps=0.01")
    one_by_one = reference("convnet", *words, "optimizer.fused=false", *REFERENCE.get(mode, ()))
    ranks = 1 if mode == "none" else 2
    fused = run(tmp_path, ranks, *EXPERIMENTS["convnet"], *COMMON, *words, f"parallel={mode}")
    assert_equal(fused, one_by_one)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "option",
    [
        "parallel.static_graph=true",
        "parallel.find_unused_parameters=true",
        "parallel.gradient_as_bucket_view=false",
        "parallel.bucket_cap_mb=0.001",
        "parallel.broadcast_buffers=false",
    ],
)
def test_options_of_ddp_change_no_number(option: str, reference: Callable[..., Run], tmp_path: Path) -> None:
    words = (*EXPERIMENTS["convnet"], *COMMON, "micro_batches=2", "parallel=ddp", option)
    assert_equal(run(tmp_path, 2, *words), reference("convnet", "micro_batches=2"))


def test_unsynchronised_batch_norm_is_another_run(reference: Callable[..., Run], tmp_path: Path) -> None:
    """What the matrix would miss if synchronisation did nothing."""
    words = (*EXPERIMENTS["convnet"], *COMMON, "parallel=ddp", "sync_batchnorm=false")
    apart = run(tmp_path, 2, *words)
    assert apart.losses[1] != pytest.approx(reference("convnet").losses[1], rel=1e-6)


def test_fp32_agrees_over_the_first_steps(tmp_path: Path) -> None:
    words = (*EXPERIMENTS["convnet"], "optimizer.lr=0.01", "max_steps=5", "logger=none")
    one, two = run(tmp_path / "1", 1, *words), run(tmp_path / "2", 2, *words, "parallel=ddp")
    for step in range(1, 6):
        assert two.losses[step] == pytest.approx(one.losses[step], rel=1e-4)


@pytest.mark.fault("a rank without a sample", outcome="survived")
def test_last_batch_may_leave_ranks_without_a_sample(tmp_path: Path) -> None:
    """33 samples in batches of 16: the third step has one sample for four ranks and two micro-batches."""
    words = ("model=toy", "data=toy", "data.num_train=33", "batch_size=16", "micro_batches=2", "max_steps=6")
    one = run(tmp_path / "1", 1, *words, *COMMON[:3], "epochs=2", "logger=none")
    for mode in ("ddp", "allreduce"):
        four = run(tmp_path / mode, 4, *words, *COMMON[:3], "epochs=2", "logger=none", f"parallel={mode}")
        assert four.losses == pytest.approx(one.losses, rel=1e-9)
