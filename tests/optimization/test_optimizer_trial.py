"""Custom optimizers whose updates depend on random numbers or on other parameters: equal in a mode, or refused."""

from pathlib import Path

import pytest
import torch
from custom_optimizers import Adaptive, ByShape, Langevin, Normalized, Seeded
from mode_cases import Case
from parity import COMMON, assert_equal
from torch import nn
from worlds import build_experiment, run

from runner.errors import InputError
from runner.optimization.optimizer_trial import Dependencies, try_updates

SHAPES = [torch.Size([8, 3]), torch.Size([8]), torch.Size([])]
CHAIN = ("model=linear", "model._target_=custom_models.Chain", "data=toy", "data.num_train=90", "batch_size=90")
NO_SGD = ("~optimizer.momentum", "~optimizer.weight_decay", "~optimizer.nesterov")


def of(name: str) -> tuple[str, ...]:
    return (*CHAIN, f"optimizer._target_=custom_optimizers.{name}", *NO_SGD)


@pytest.mark.parametrize(
    ("kind", "draws", "others"),
    [
        (Langevin, True, False),
        (Normalized, False, True),
        (Adaptive, False, True),
        (Seeded, False, True),
        (ByShape, False, False),
        (torch.optim.NAdam, False, False),
    ],
)
def test_dependencies(kind: type[torch.optim.Optimizer], draws: bool, others: bool) -> None:
    before = torch.get_rng_state()
    assert try_updates(kind, SHAPES) == Dependencies(draws, others)
    assert try_updates(kind, SHAPES[:1]) == Dependencies(draws, others)  # all parameters have one shape
    assert torch.equal(torch.get_rng_state(), before)


def test_an_optimizer_that_rejects_small_parameters_is_not_examined() -> None:
    def make(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return ByShape(parameters)

    assert try_updates(make, [torch.Size([8, 3, 3])]) == Dependencies()


@pytest.mark.parametrize(
    ("name", "words", "message"),
    [
        *(("Langevin", (f"parallel={mode}",), "Langevin draws random") for mode in ("zero", "fsdp", "tp", "pipeline")),
        *(("Normalized", (f"parallel={mode}",), "Normalized: its update") for mode in ("zero", "pipeline", "tp")),
        ("Seeded", ("parallel=zero",), "Seeded: its update of a parameter depends on the other parameters, but"),
        ("Adaptive", ("parallel=mesh", "parallel.stage=2"), "Adaptive: its update of a parameter depends on"),
        ("Adaptive", ("parallel=mesh", "parallel.tensor=2"), "Adaptive: its update of a parameter depends on"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_modes_that_split_the_update_refuse_it(name: str, words: tuple[str, ...], message: str) -> None:
    with pytest.raises(InputError) as raised:
        build_experiment(*of(name), *words, world_size=2)
    (line,) = raised.value.messages
    assert line.startswith(f"optimizer._target_=custom_optimizers.{message}")
    assert words[0] in line and line.endswith("try parallel=ddp")


@pytest.mark.parametrize("mode", ["zero", "pipeline", "mesh"])
def test_modes_that_split_the_update_accept_others(mode: str) -> None:
    build_experiment(*of("ByShape"), f"parallel={mode}", world_size=2)


@pytest.mark.parametrize(
    ("name", "case"),
    [
        ("Langevin", Case("ddp", 2)),
        pytest.param("Langevin", Case("allreduce", 2), marks=pytest.mark.thorough),
        pytest.param("Langevin", Case("ps", 3), marks=pytest.mark.thorough),
        pytest.param("Normalized", Case("fsdp", 2), marks=pytest.mark.thorough),
    ],
    ids=str,
)
def test_it_equals_one_process_and_after_a_resume(name: str, case: Case, tmp_path: Path) -> None:
    torch.optim.SGD([nn.Parameter(torch.zeros(1))])  # torch then calls hooks for the step of a base class, too
    words = (*of(name), *COMMON, "max_steps=4")  # without dropout, each data rank has other seeds
    whole = run(tmp_path / "whole", 1, *words, *case.reference)
    first = run(tmp_path / "part", case.world_size, *words, *case.overrides, "max_steps=2")
    assert_equal(run(tmp_path / "part", case.world_size, f"resume={first.path}", "max_steps=4"), whole)
