"""Schedulers of torch, and others that change an optimizer: the same options as in a hand-written loop."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from custom_files import write_files
from torch import nn
from torch.optim import lr_scheduler
from worlds import run

from runner.errors import InputError
from runner.optimization.optimizers import try_options
from runner.optimization.torch_schedules import make_schedule

OF_TORCH = "torch.optim.lr_scheduler."
SGD = {"_target_": "torch.optim.SGD", "lr": 0.4, "momentum": 0.9, "groups": [{"match": "bias$", "lr": 0.1}]}
WARM_UP = {
    "_target_": OF_TORCH + "SequentialLR",
    "schedulers": [
        {"_target_": OF_TORCH + "LinearLR", "start_factor": 0.1, "total_iters": 3},
        {"_target_": OF_TORCH + "CosineAnnealingLR", "T_max": 6, "_partial_": True},
    ],
    "milestones": [3],
}


def halve(step: int, gamma: float = 0.5) -> float:
    return gamma**step


def make(node: dict[str, Any], num_steps: int = 12, steps_per_epoch: int = 3, optimizer: Any = SGD) -> Any:
    return make_schedule(node, {"scheduler": "mine"}, try_options(optimizer, {}), num_steps, steps_per_epoch)


def warm_up(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
    parts = [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3), lr_scheduler.CosineAnnealingLR(optimizer, 6)]
    return lr_scheduler.SequentialLR(optimizer, parts, [3])


@pytest.mark.parametrize(
    ("node", "by_hand"),
    [
        ({"_target_": OF_TORCH + "StepLR", "step_size": 2}, lambda optimizer: lr_scheduler.StepLR(optimizer, 2)),
        (  # changes the momentum, too
            {"_target_": OF_TORCH + "OneCycleLR", "max_lr": [0.3, 0.6]},
            lambda optimizer: lr_scheduler.OneCycleLR(optimizer, [0.3, 0.6], total_steps=12),
        ),
        (
            {"_target_": OF_TORCH + "LambdaLR", "lr_lambda": {"_target_": f"{__name__}.halve", "_partial_": True}},
            lambda optimizer: lr_scheduler.LambdaLR(optimizer, halve),
        ),
        (WARM_UP, warm_up),
    ],
)
def test_each_step_has_the_options_of_a_hand_written_loop(
    node: dict[str, Any], by_hand: Callable[[torch.optim.Optimizer], lr_scheduler.LRScheduler]
) -> None:
    groups = [{"params": [nn.Parameter(torch.zeros(()))], "lr": lr} for lr in (0.4, 0.1)]
    optimizer = torch.optim.SGD(groups, momentum=0.9)
    scheduler, expected = by_hand(optimizer), []
    for _ in range(12):
        expected.append([(group["lr"], group["momentum"]) for group in optimizer.param_groups])
        optimizer.step()
        scheduler.step()
    schedule = make({**node, "every": "step"})

    def found(step: int) -> list[tuple[float, float]]:
        return [(group["lr"], group["momentum"]) for group in schedule(step, 12, 3)]

    assert [found(step) for step in range(12)] == expected
    assert found(5) == expected[5]  # an earlier step, as after a rewind
    resumed = make({**node, "every": "step"})
    assert [(group["lr"], group["momentum"]) for group in resumed(7, 12, 3)] == expected[7]


def test_a_scheduler_that_is_stepped_after_each_epoch_counts_epochs() -> None:
    schedule = make({"_target_": OF_TORCH + "ExponentialLR", "gamma": 0.5, "every": "epoch"})
    assert [schedule(step, 12, 3)[0]["lr"] for step in (0, 2, 3, 5, 6)] == [0.4, 0.4, 0.2, 0.2, 0.1]
    cycle = make({"_target_": OF_TORCH + "OneCycleLR", "max_lr": 0.3, "every": "epoch"}, num_steps=10)
    assert cycle.scheduler.total_steps == 4  # epochs, of which the last is not complete


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"_target_": OF_TORCH + "StepLR", "step_size": 2},
            "scheduler=mine: write `every: epoch` or `every: step` into",
        ),
        ({"_target_": OF_TORCH + "StepLR", "step_size": 2, "every": "batch"}, "scheduler.every=batch must be epoch"),
        ({"_target_": OF_TORCH + "ReduceLROnPlateau", "every": "epoch"}, "its step needs metrics, .* scheduler=cosine"),
        (
            {"_target_": OF_TORCH + "OneCycleLR", "max_lr": 0.3, "total_steps": 9, "every": "step"},
            "it ends after 9 steps, but the run steps it 12 times; leave out total_steps",
        ),
        (
            {"_target_": OF_TORCH + "LambdaLR", "lr_lambda": 0.5, "every": "step"},
            "scheduler=mine: LambdaLR cannot be constructed with: TypeError",
        ),
        ({"_target_": OF_TORCH + "StepLR", "step_size": 0, "every": "step"}, "cannot be stepped with: ZeroDivision"),
    ],
)
def test_a_scheduler_that_cannot_work_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message) as refused:
        make(options)
    assert len(refused.value.messages) == 1


@pytest.mark.parametrize(("mode", "world_size"), [("none", 1), ("zero", 2), ("pipeline", 2), ("ps", 3)])
def test_a_run_is_the_same_in_every_mode_and_after_a_resume(
    mode: str, world_size: int, tmp_path: Path, one_cycle: tuple[str, ...]
) -> None:
    options = (*one_cycle, f"parallel={mode}")
    whole = run(tmp_path / "whole", world_size, *options)
    rates = [*whole.values("train/learning_rate").values()]
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(()))], lr=0.1, momentum=0.9)
    scheduler, expected = lr_scheduler.OneCycleLR(optimizer, 0.3, total_steps=8), []
    for _ in range(8):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert rates == expected
    first = run(tmp_path / "cut", world_size, *options, "max_steps=5", "+scheduler.total_steps=8")
    resumed = run(tmp_path / "cut", world_size, f"resume={first.path}", "max_steps=null")
    assert resumed.losses == whole.losses and resumed.result["weights_sha256"] == whole.result["weights_sha256"]
    alone = run(tmp_path / "alone", 1, *one_cycle) if world_size > 1 else whole
    assert whole.losses == pytest.approx(alone.losses, abs=1e-9)


@pytest.fixture
def one_cycle(tmp_path: Path) -> tuple[str, ...]:
    """Return the overrides of a run of 8 steps under OneCycleLR, which changes the momentum, too."""
    files = {
        "scheduler/cycle.yaml": f"_target_: {OF_TORCH}OneCycleLR\nmax_lr: 0.3\nevery: step\n",
        "optimizer/momentum.yaml": "_target_: torch.optim.SGD\nlr: 0.1\nmomentum: 0.9\n",
    }
    write_files(tmp_path / "mine", files)
    small = ("model=mlp", "model.hidden=[8,8]", "data=toy", "epochs=2", "batch_size=256", "precision=fp64")
    chosen = (f"--config-dir={tmp_path / 'mine'}", "scheduler=cycle", "optimizer=momentum", "log_every=1")
    return (*chosen, *small, "logger=none")
