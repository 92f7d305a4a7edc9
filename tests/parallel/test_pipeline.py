"""Pipelining: every schedule gives the numbers of one process that accumulates over the same micro-batches."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from parity import COMMON, assert_equal
from torch import nn
from worlds import Run, build_experiment, run

from runner.errors import InputError
from runner.parallel.pipeline import Pipeline, Schedule, num_operations, num_parameters, partition, trainable_units

# Eight stages. 32 samples do not divide evenly, and the last step of an epoch has 3, so that micro-batches are missing.
DEEP = (
    *("precision=fp64", "optimizer.lr=0.01", "epochs=9", "logger=none"),
    *("model=mlp", "model.hidden=[12,11,10,9,8,7,6]", "data=toy", "data.num_train=67", "data.num_val=9", "max_steps=4"),
)
SHORT = (*DEEP, "batch_size=32")
# BatchNorm needs two samples in each micro-batch of all replicas: the last step has 17 for eight.
NORM = (*DEEP, "model.batch_norm=true", "data.num_train=173", "batch_size=78", "max_steps=3")


@pytest.mark.parametrize(
    "schedule",
    [pytest.param(name, marks=() if name in ("1F1B", "ZBV") else pytest.mark.thorough) for name in get_args(Schedule)],
)
def test_steps_may_have_fewer_samples_than_micro_batches(
    schedule: str, one_process: Callable[..., Run], tmp_path: Path
) -> None:
    overrides = ("parallel=pipeline", f"parallel.schedule={schedule}", "optimizer=adamw")
    expected = one_process(*SHORT, "micro_batches=4", "optimizer=adamw")
    assert_equal(run(tmp_path, 2, *SHORT, *overrides), expected)


def test_a_missing_micro_batch_of_a_stage_with_complex_parameters(
    one_process: Callable[..., Run], tmp_path: Path
) -> None:
    """The second step has one sample for two micro-batches."""
    overrides = ("model=linear", "model._target_=fuzz_parts.Net", "+model.parts=[rotary,block]", "data=toy")
    overrides = (*overrides, "data.num_train=7", "batch_size=6", "max_steps=4", *COMMON)
    made = run(tmp_path, 2, *overrides, "parallel=pipeline", "parallel.micro_batches=2")
    assert_equal(made, one_process(*overrides))


@pytest.mark.parametrize(
    ("schedule", "stages"),
    [
        ("1F1B", 2),
        pytest.param("ZBV", 4, marks=pytest.mark.thorough),
        pytest.param("Interleaved1F1B", 4, marks=pytest.mark.thorough),
        pytest.param("DualPipeV", 4, marks=pytest.mark.thorough),
    ],
)
def test_schedule_equals_one_process(
    schedule: str, stages: int, one_process: Callable[..., Run], tmp_path: Path
) -> None:
    """On four ranks: as one pipeline, and as two replicas of a pipeline of two with synchronized BatchNorm."""
    count = 8 if schedule == "DualPipeV" else 4
    overrides = ("parallel=pipeline", f"parallel.schedule={schedule}", f"parallel.stages={stages}")
    made = run(tmp_path, 4, *NORM, *overrides, f"parallel.micro_batches={count}")
    assert_equal(made, one_process(*NORM, f"micro_batches={count}"))


@pytest.mark.parametrize(
    ("world_size", "count", "options"),
    [
        (2, 6, ("micro_batches=2", "parallel.micro_batches=3", "parallel.balance=compute")),
        pytest.param(*(1, 4, ("parallel.schedule=LoopedBFS", "parallel.virtual_stages=4")), marks=pytest.mark.thorough),
        pytest.param(
            *(2, 4, ("parallel.schedule=Interleaved1F1B", "parallel.virtual_stages=3")), marks=pytest.mark.thorough
        ),
    ],
    ids=str,
)
def test_options_change_no_number(
    world_size: int, count: int, options: tuple[str, ...], one_process: Callable[..., Run], tmp_path: Path
) -> None:
    expected = one_process(*SHORT, f"micro_batches={count}")
    assert_equal(run(tmp_path, world_size, *SHORT, "parallel=pipeline", *options), expected)


@pytest.mark.thorough
def test_two_replicas_with_one_validation_sample(one_process: Callable[..., Run], tmp_path: Path) -> None:
    """Also the norm over stages, and the log of the stages of each rank."""
    overrides = (*SHORT, "data.num_val=1", "clip_grad_norm=0.1")
    made = run(tmp_path, 4, *overrides, "parallel=pipeline", "parallel.stages=2")
    assert_equal(made, one_process(*overrides, "micro_batches=4"))
    text = (made.path / "log.txt").read_text()
    assert "pipeline rank 0 and 2: stages 0-2 of 8, 54." in text
    assert "pipeline rank 1 and 3: stages 3-7 of 8, 45." in text


def test_activations_are_sent_in_the_dtype_of_autocast(one_process: Callable[..., Run], tmp_path: Path) -> None:
    overrides = (*SHORT, "precision=bf16", "max_steps=2")
    made = run(tmp_path, 2, *overrides, "parallel=pipeline")
    assert made.losses == pytest.approx(one_process(*overrides).losses, rel=0.02)


@pytest.mark.parametrize(
    "optimizer", [pytest.param("optimizer.momentum=0", marks=pytest.mark.thorough), "optimizer=adamw"]
)
def test_checkpoint_moves_between_modes(optimizer: str, one_process: Callable[..., Run], tmp_path: Path) -> None:
    """With AdamW, and with plain SGD, which has no state."""
    part = run(tmp_path, 2, *SHORT, optimizer, "parallel=pipeline", "max_steps=2")
    run(tmp_path, 1, f"resume={part.path}", "parallel=none", "micro_batches=4", "max_steps=4")
    assert_equal(part, one_process(*SHORT, optimizer, "micro_batches=4"))


class Incomplete(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)

    def stages(self) -> list[nn.Module]:
        return [self.first]


def deep(num_stages: int, **attributes: Any) -> nn.Module:
    module = nn.Sequential(*(nn.Linear(2, 2) for _ in range(num_stages)))
    module.stages = lambda: list(module)  # type: ignore[assignment]
    for name, value in attributes.items():
        setattr(module, name, value)
    return module


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (nn.Linear(2, 2), "needs a model that offers its stages()"),
        (deep(2, place=lambda devices: None), "spread over devices"),
        (Incomplete(), "leave out second.weight"),
    ],
)
def test_unsuitable_models_are_refused(module: nn.Module, message: str) -> None:
    (refusal,) = Pipeline().check(module, "none")
    assert message in refusal


@pytest.mark.parametrize(
    ("options", "num_stages", "world_size", "message"),
    [
        ({"stages": 3}, 8, 4, "parallel.stages=3 must divide the world of 4 ranks; try 2 or 4"),
        ({"stages": 4}, 3, 4, "parallel.stages=4 x 1 per rank must be at most 3, .* try parallel.stages=2"),
        ({"schedule": "ZBV", "stages": 2}, 3, 2, "parallel.stages=2 x 2 per rank must be at most 3, "),
        (
            {"schedule": "1F1B", "stages": 4, "micro_batches": 3},
            8,
            4,
            "micro_batches=3 must be at least 4 for",
        ),
        ({"schedule": "DualPipeV", "stages": 4}, 8, 4, "micro_batches=4 must be at least 8 for"),
        ({"schedule": "Interleaved1F1B", "stages": 2, "micro_batches": 5}, 8, 2, "must be a multiple of 2 .* try 4"),
        ({"schedule": "LoopedBFS"}, 1, 4, "stages=1 x 2 per rank must be at most 1, .*schedule=1F1B"),
        ({"stages": 0}, 8, 4, "parallel.stages=0 must divide the world of 4 ranks; try 1 or 2"),
        ({"virtual_stages": 2}, 8, 4, "parallel.virtual_stages=2 must be 1 for schedule=GPipe"),
        ({"schedule": "LoopedBFS", "virtual_stages": 1}, 8, 4, "must be at least 2 for schedule=LoopedBFS"),
        ({"schedule": "ZBV", "virtual_stages": 3}, 8, 4, "parallel.virtual_stages=3 must be 2 for schedule=ZBV"),
    ],
)
def test_invalid_options_and_numbers_of_stages_are_refused(
    options: dict[str, Any], num_stages: int, world_size: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        mode = Pipeline(**options).at(world_size)
        assert mode.check(deep(num_stages), "none") == []
        mode.fit(deep(num_stages))


def test_null_stages_are_as_many_as_fit() -> None:
    for num_stages, schedule, expected in ((8, "GPipe", 4), (3, "GPipe", 2), (1, "GPipe", 1), (5, "LoopedBFS", 2)):
        mode = Pipeline(schedule=schedule).at(4)  # type: ignore[arg-type]
        assert mode.resolved_axes.stage == 4  # the model is unknown
        assert mode.check(deep(num_stages), "none") == []
        axes = mode.fit(deep(num_stages)).resolved_axes
        assert (axes.stage, axes.replicate) == (expected, 4 // expected)
        assert axes.size == 4 and axes.micro_batches == 4


def test_too_small_a_batch_is_refused_with_all_factors() -> None:
    with pytest.raises(InputError, match=r"micro_batches x parallel.micro_batches = 2 x 4 = 8"):
        build_experiment("model=toy", "data=toy", "parallel=pipeline", "micro_batches=2", "batch_size=6")


def test_partition_is_even() -> None:
    for costs, sizes in (
        ([1, 1, 1, 1], [2, 2]),
        ([10, 1, 1, 1], [1, 3]),
        ([5, 1, 1, 1, 1, 5], [1, 4, 1]),
        ([10, 1, 1, 1, 1], [1, 2, 2]),  # the largest sum is fixed; the other groups are as even as possible
        ([0, 0, 0], [1, 1, 1]),
    ):
        assert [len(group) for group in partition(costs, len(sizes))] == sizes


def test_units_have_something_to_train_and_costs() -> None:
    stages = [nn.Flatten(), nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2), nn.ReLU()]
    units = trainable_units(stages)
    assert [len(unit) for unit in units] == [3, 2]
    assert num_parameters(units) == [15, 8]
    assert num_operations(units, torch.ones(1, 2, 2)) == [24, 12]  # a multiplication and an addition per weight
