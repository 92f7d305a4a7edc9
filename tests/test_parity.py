"""Every mode, at every world size, gives the numbers of one process: in float64, where no wrong formula can hide."""

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from worlds import Run, run

from runner import CONF

# SGD with momentum, the default; 10 steps, two epochs or more: the last batch of each is uneven, and so are its shares.
EXPERIMENTS = {
    "toy": ("model=toy", "data=toy", "data.num_train=350", "batch_size=90"),
    "mlp": ("model=mlp", "model.hidden=[16]", "model.batch_norm=true", "data.sample_shape=[1,8,8]", "batch_size=350"),
    "convnet": ("model=convnet", "model.channels=[4,8]", "data.sample_shape=[1,8,8]", "batch_size=350"),
    "transformer": (
        "model=transformer",
        "model.dim=16",
        "model.depth=2",
        "model.patch_size=4",
        "data.sample_shape=[1,8,8]",
        "batch_size=350",
    ),
}
COMMON = ("precision=fp64", "optimizer.lr=0.01", "epochs=9", "max_steps=10", "logger=none")
MODES = sorted(path.stem for path in (CONF / "parallel").glob("*.yaml"))
# What the one process is told besides: pipeline cuts a micro-batch into four, and BatchNorm sees each by itself.
REFERENCE = {"pipeline": ("micro_batches=4",)}
# What may be absent from the matrix, by name: these run on one process by definition, or never on one.
ABSENT = {*((mode, world_size) for mode in ("none", "dp") for world_size in (2, 4)), ("ps", 1)}
# By definition not the numbers of one process; test_local_sgd.py has a simulation of its ranks.
INEXACT = {("local_sgd", 2), ("local_sgd", 4)}


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Run]:
    @functools.cache
    def of(model: str, *options: str) -> Run:
        return run(tmp_path_factory.mktemp(model), 1, *EXPERIMENTS[model], *COMMON, *options)

    return of


def assert_equal(one: Run, reference: Run, tolerance: float = 1e-9) -> None:
    assert one.losses.keys() == reference.losses.keys() == set(range(1, 11))
    for step, loss in reference.losses.items():
        assert one.losses[step] == pytest.approx(loss, rel=tolerance)
    weights, expected = one.weights, reference.weights
    assert weights.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(weights[name], tensor, rtol=tolerance, atol=tolerance, msg=name)
    assert one.result["metrics"] == pytest.approx(reference.result["metrics"], rel=tolerance)


@pytest.mark.filterwarnings("ignore:parallel=dp")
@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("model", EXPERIMENTS)
@pytest.mark.parametrize("mode", MODES)
def test_mode_equals_one_process(
    mode: str, model: str, world_size: int, reference: Callable[..., Run], tmp_path: Path
) -> None:
    if (mode, world_size) in ABSENT:
        pytest.skip(f"parallel={mode} does not run on {world_size} ranks")
    if (mode, world_size) in INEXACT:
        pytest.skip(f"parallel={mode} has other numbers on {world_size} ranks")
    expected = reference(model, *REFERENCE.get(mode, ()))
    assert_equal(run(tmp_path, world_size, *EXPERIMENTS[model], *COMMON, f"parallel={mode}"), expected)


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
@pytest.mark.parametrize("mode", ["ddp", "allreduce"])
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


def test_last_batch_may_leave_ranks_without_a_sample(tmp_path: Path) -> None:
    """33 samples in batches of 16: the third step has one sample for four ranks and two micro-batches."""
    words = ("model=toy", "data=toy", "data.num_train=33", "batch_size=16", "micro_batches=2", "max_steps=6")
    one = run(tmp_path / "1", 1, *words, *COMMON[:3], "epochs=2", "logger=none")
    for mode in ("ddp", "allreduce"):
        four = run(tmp_path / mode, 4, *words, *COMMON[:3], "epochs=2", "logger=none", f"parallel={mode}")
        assert four.losses == pytest.approx(one.losses, rel=1e-9)
