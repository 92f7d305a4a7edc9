"""Pipelining: every schedule gives the numbers of one process that accumulates over the same micro-batches."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import RankError
from torch import nn
from worlds import Run, configure, run

from runner.parallel.pipeline import LOOPED, SINGLE, V_SHAPED, Pipeline
from runner.parallel.stage_balance import num_operations, num_parameters, partition, trainable_units

COMMON = ("precision=fp64", "optimizer.lr=0.01", "epochs=9", "logger=none")
# Eight stages. 32 samples are cut unevenly; the last step of an epoch has 3, which leaves micro-batches out.
DEEP = (
    "model=mlp",
    "model.hidden=[12,11,10,9,8,7,6]",
    "data=toy",
    "data.num_train=67",
    "data.num_val=9",
    "max_steps=4",
)
SHORT = (*DEEP, "batch_size=32")
# BatchNorm needs two samples in each micro-batch of all replicas: the last step has 17 for eight.
NORM = (*DEEP, "model.batch_norm=true", "data.num_train=173", "batch_size=78", "max_steps=3")
SCHEDULES = (*SINGLE, *LOOPED, *V_SHAPED)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Run]:
    @functools.cache
    def of(*options: str) -> Run:
        return run(tmp_path_factory.mktemp("none"), 1, *COMMON, *options)

    return of


def assert_equal(one: Run, reference: Run, tolerance: float = 1e-9) -> None:
    assert one.losses == pytest.approx(reference.losses, rel=tolerance)
    assert one.weights.keys() == reference.weights.keys()
    for name, tensor in reference.weights.items():
        torch.testing.assert_close(one.weights[name], tensor, rtol=tolerance, atol=tolerance, msg=name)
    assert one.result["metrics"] == pytest.approx(reference.result["metrics"], rel=tolerance)
    norms, expected = (
        [m["train/grad_norm"] for m in each.lines if "train/grad_norm" in m] for each in (one, reference)
    )
    assert norms == pytest.approx(expected, rel=tolerance)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedule_takes_a_step_of_fewer_samples_than_micro_batches(
    schedule: str, reference: Callable[..., Run], tmp_path: Path
) -> None:
    words = ("parallel=pipeline", f"parallel.schedule={schedule}", "optimizer=adamw")
    assert_equal(run(tmp_path, 2, *COMMON, *SHORT, *words), reference(*SHORT, "micro_batches=4", "optimizer=adamw"))


@pytest.mark.parametrize("stages", [pytest.param(2, marks=pytest.mark.thorough), 4])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedule_equals_one_process(schedule: str, stages: int, reference: Callable[..., Run], tmp_path: Path) -> None:
    """On four ranks: as one pipeline, and as two replicas of a pipeline of two with synchronized BatchNorm."""
    count = 8 if schedule == "DualPipeV" and stages == 4 else 4
    words = ("parallel=pipeline", f"parallel.schedule={schedule}", f"parallel.stages={stages}")
    try:
        piped = run(tmp_path, 4, *COMMON, *NORM, *words, f"parallel.micro_batches={count}")
    except RankError as error:
        if "needs a newer torch than" in str(error):
            pytest.skip("this torch splits no backward of an autograd.Function")
        raise
    assert_equal(piped, reference(*NORM, f"micro_batches={count}"))


@pytest.mark.parametrize(
    ("world_size", "count", "options"),
    [
        (2, 6, ("micro_batches=2", "parallel.micro_batches=3")),
        (2, 4, ("clip_grad_norm=0.1",)),
        (4, 4, ("clip_grad_norm=0.1", "parallel.stages=2")),
        (2, 4, ("parallel.balance=compute",)),
        (4, 4, ("parallel.stages=1",)),
        (1, 4, ("parallel.schedule=LoopedBFS", "parallel.virtual_stages=4")),
        (2, 4, ("parallel.schedule=Interleaved1F1B", "parallel.virtual_stages=3")),
    ],
    ids=str,
)
def test_option_changes_no_number(
    world_size: int, count: int, options: tuple[str, ...], reference: Callable[..., Run], tmp_path: Path
) -> None:
    general = tuple(option for option in options if option.startswith("clip"))
    expected = reference(*SHORT, *general, f"micro_batches={count}")
    assert_equal(run(tmp_path, world_size, *COMMON, *SHORT, "parallel=pipeline", *options), expected)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("first", [pytest.param("none", marks=pytest.mark.thorough), "pipeline"])
def test_checkpoint_goes_from_one_mode_to_the_other(
    first: str, optimizer: str, reference: Callable[..., Run], tmp_path: Path
) -> None:
    momentum = ("optimizer.momentum=0",) if optimizer == "sgd" else ()  # a plain SGD has no state to carry
    experiment = (*SHORT, f"optimizer={optimizer}", *momentum)
    modes = {
        "none": (1, ("parallel=none", "micro_batches=4")),
        "pipeline": (2, ("parallel=pipeline", "micro_batches=1")),
    }
    second = "pipeline" if first == "none" else "none"
    (size, words), (other_size, other_words) = modes[first], modes[second]
    part = run(tmp_path, size, *COMMON, *experiment, *words, "max_steps=2")
    run(tmp_path, other_size, f"resume={part.path}", f"outputs={tmp_path}", *other_words, "max_steps=4")
    assert_equal(part, reference(*experiment, "micro_batches=4"))


def test_log_says_who_has_which_stages(tmp_path: Path) -> None:
    """In bfloat16, too: what is sent then is of another type than the weights."""
    words = (*SHORT, "precision=bf16", "logger=none", "parallel=pipeline", "parallel.stages=2")
    made = run(tmp_path, 4, *words)
    text = (made.path / "log.txt").read_text()
    assert "pipeline rank 0 and 2: stages 0-2 of 8, 54." in text
    assert "pipeline rank 1 and 3: stages 3-7 of 8, 45." in text
    assert made.result["metrics"]["val/loss"] > 0


def test_one_validation_sample_for_two_replicas(reference: Callable[..., Run], tmp_path: Path) -> None:
    words = (*SHORT, "data.num_val=1", "max_steps=1")
    piped = run(tmp_path, 4, *COMMON, *words, "parallel=pipeline", "parallel.stages=2")
    assert_equal(piped, reference(*words, "micro_batches=4"))


# -- what is refused ---------------------------------------------------------------------------------------------------


class Forgetful(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)

    def stages(self) -> list[nn.Module]:
        return [self.first]


def deep(num_stages: int, **options: Any) -> nn.Module:
    module = nn.Sequential(*(nn.Linear(2, 2) for _ in range(num_stages)))
    module.stages = lambda: list(module)  # type: ignore[assignment]
    for name, value in options.items():
        setattr(module, name, value)
    return module


@pytest.mark.parametrize(
    ("module", "options", "message"),
    [
        (nn.Linear(2, 2), (), "needs a model that offers its stages()"),
        (deep(2, place=None), (), "spreads its own over several"),
        (deep(2), ("precision=fp16",), "precision=fp16: parallel=pipeline has no gradient scaler"),
        (deep(2), ("compile=true",), "compile=true compiles a whole model"),
        (Forgetful(), (), "leave out second.weight"),
    ],
)
def test_check_refuses(module: nn.Module, options: tuple[str, ...], message: str) -> None:
    config, _ = configure("parallel=pipeline", *options)
    (refused,) = Pipeline().check(config, module)
    assert message in refused


@pytest.mark.parametrize(
    ("options", "num_stages", "world_size", "message"),
    [
        ({"stages": 3}, 8, 4, "parallel.stages=3 must divide the world of 4 ranks; try 2 or 4"),
        ({"stages": 2}, 8, 1, "parallel.stages=2 must divide the world of 1 rank; try 1"),
        ({"stages": 4}, 3, 4, "parallel.stages=4 must be at most the 3 stages .* try parallel.stages=2"),
        ({"schedule": "ZBV", "stages": 2}, 3, 2, r"parallel.stages=2 x 2 per rank must be at most the 3 stages"),
        (
            {"schedule": "1F1B", "stages": 4, "micro_batches": 3},
            8,
            4,
            "micro_batches=3 must be at least the 4 .* try 4",
        ),
        ({"schedule": "DualPipeV", "stages": 4}, 8, 4, "micro_batches=4 must be at least the 8 stages .* try 8"),
        ({"schedule": "Interleaved1F1B", "stages": 2, "micro_batches": 5}, 8, 2, "must be a multiple of 2, .* try 4"),
        (
            {"schedule": "LoopedBFS"},
            1,
            4,
            "parallel.stages=1 x 2 per rank must be at most the 1 stage with .*schedule=1F1B",
        ),
    ],
)
def test_axes_refuse(options: dict[str, Any], num_stages: int, world_size: int, message: str) -> None:
    mode = Pipeline(**options)
    assert mode.check(configure("parallel=pipeline")[0], deep(num_stages)) == []
    with pytest.raises(ValueError, match=message):
        mode.axes(world_size)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stages": 0}, "parallel.stages=0 must be at least 1"),
        ({"micro_batches": 0}, "parallel.micro_batches=0 must be at least 1"),
        ({"virtual_stages": 2}, "parallel.virtual_stages=2 has no effect on schedule=GPipe"),
        ({"schedule": "LoopedBFS", "virtual_stages": 1}, "must be at least 2 for schedule=LoopedBFS"),
        ({"schedule": "ZBV", "virtual_stages": 3}, "parallel.virtual_stages=3 must be 2 for schedule=ZBV"),
    ],
)
def test_constructor_refuses(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Pipeline(**options)


def test_null_stages_are_as_many_as_fit() -> None:
    config, _ = configure("parallel=pipeline")
    for num_stages, schedule, expected in ((8, "GPipe", 4), (3, "GPipe", 2), (1, "GPipe", 1), (5, "LoopedBFS", 2)):
        mode = Pipeline(schedule=schedule)  # type: ignore[arg-type]
        assert mode.axes(4).stage == 4  # of a model not yet seen
        assert mode.check(config, deep(num_stages)) == []
        axes = mode.axes(4)
        assert (axes.stage, axes.replicate) == (expected, 4 // expected)
        assert axes.size == 4 and axes.micro_batches == 4


def test_too_small_a_batch_is_refused_with_all_factors(tmp_path: Path) -> None:
    with pytest.raises(RankError, match=r"data ranks x micro_batches x parallel.micro_batches = 1 x 2 x 4 = 8"):
        run(tmp_path, 1, "model=toy", "data=toy", "parallel=pipeline", "micro_batches=2", "batch_size=6", "logger=none")


# -- who has which stages ----------------------------------------------------------------------------------------------


def test_placement_goes_round_or_there_and_back() -> None:
    assert [Pipeline(schedule="LoopedBFS").owner(group, 2) for group in range(4)] == [0, 1, 0, 1]
    assert [Pipeline(schedule="ZBV").owner(group, 3) for group in range(6)] == [0, 1, 2, 2, 1, 0]


@pytest.mark.parametrize(
    ("costs", "sizes"),
    [
        ([1, 1, 1, 1], [2, 2]),
        ([10, 1, 1, 1], [1, 3]),
        ([1, 1, 1, 10], [3, 1]),
        ([5, 1, 1, 1, 1, 5], [1, 4, 1]),
        ([10, 1, 1, 1, 1], [1, 2, 2]),  # the largest is given; the others are as even as can be
        ([0, 0, 0], [1, 1, 1]),
        ([5], [1]),
    ],
)
def test_partition_is_even(costs: list[int], sizes: list[int]) -> None:
    assert [len(group) for group in partition(costs, len(sizes))] == sizes


def test_units_have_something_to_train_and_costs() -> None:
    stages = [nn.Flatten(), nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2), nn.ReLU()]
    units = trainable_units(stages)
    assert [len(unit) for unit in units] == [3, 2]
    assert num_parameters(units) == [15, 8]
    assert num_operations(units, torch.ones(1, 2, 2)) == [24, 12]  # a multiplication and an addition per weight
