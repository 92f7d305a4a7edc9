"""parallel=zero beyond the parity matrix: what a rank holds of the optimizer, and checkpoints of other modes."""

import functools
from pathlib import Path

import pytest
import torch
from ranks import run_ranks
from torch import nn
from worlds import run

from runner.distributed.backend import Backend
from runner.distributed.environment import RankInfo
from runner.distributed.world import World
from runner.parallel.zero import Zero
from runner.training.batch import MicroBatch, StepBatch
from runner.training.precision import Precision
from runner.training.strategy import Recipe
from runner.training.supervised import Supervised

TOY = ("model=toy", "data=toy", "data.num_train=350", "batch_size=90", "precision=fp64", "epochs=9", "logger=none")


def test_the_optimizer_state_is_cut_among_the_ranks() -> None:
    def count(rank: int, world_size: int) -> tuple[int, list[str]]:
        world = World(RankInfo(rank, rank, world_size, world_size), None, Backend())
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(10, 10), nn.Linear(10, 5)).double()
        make = functools.partial(torch.optim.AdamW, lr=0.01)
        precision = Precision("fp64", world.device)
        sample = torch.zeros(1, 10, dtype=torch.float64)
        objective = Supervised(nn.MSELoss())
        spread = Zero().prepare(Recipe(module, objective, make, precision, None, world.device, sample), world)
        batch = MicroBatch((torch.randn(4, 10).double(), torch.randn(4, 5).double()), range(4))
        spread.forward_backward(StepBatch([batch], 4 * world_size, 0.0))
        spread.step(0.5, want_norm=False)
        local = spread._optimizer.optim
        assert local.param_groups[0]["lr"] == 0.005  # the schedule reaches the optimizer that steps
        held = sum(t.numel() for state in local.state.values() for t in state.values() if t.dim())
        return held, [name for name in spread.state().pieces if name.endswith("exp_avg")]

    (held_0, written_0), (held_1, written_1) = run_ranks(count, 2)
    assert held_0 + held_1 == 2 * 165  # two moments of each parameter
    assert min(held_0, held_1) > 0
    assert len(written_0) + len(written_1) == len({*written_0, *written_1}) == 4  # each writes its own


@pytest.mark.parametrize(
    "option", ["clip_grad_norm=0.1", "scheduler=cosine", "parallel.parameters_as_bucket_view=true"]
)
def test_options_change_no_number(option: str, tmp_path: Path) -> None:
    words = (*TOY, "optimizer=adamw", "max_steps=10")
    one = run(tmp_path / "1", 1, *words, *([] if option.startswith("parallel") else [option]))
    three = run(tmp_path / "3", 3, *words, "parallel=zero", option, "micro_batches=2")
    assert three.losses == pytest.approx(one.losses, rel=1e-9)


@pytest.mark.thorough
def test_checkpoints_go_to_and_from_other_modes(tmp_path: Path) -> None:
    words = (*TOY, "optimizer=adamw")
    whole = run(tmp_path / "whole", 1, *words, "max_steps=12")
    part = run(tmp_path / "part", 2, *words, "max_steps=4", "parallel=zero")
    with_recorded = (f"resume={part.path}", f"outputs={tmp_path / 'part'}")
    run(tmp_path / "part", 4, *with_recorded, "max_steps=6", "parallel=zero")
    run(tmp_path / "part", 2, *with_recorded, "max_steps=8", "parallel=ddp")
    run(tmp_path / "part", 1, *with_recorded, "max_steps=10", "parallel=zero")
    run(tmp_path / "part", 1, *with_recorded, "max_steps=12", "parallel=none")
    assert part.losses == pytest.approx(whole.losses, rel=1e-9)
    for name, tensor in whole.weights.items():
        torch.testing.assert_close(part.weights[name], tensor, rtol=1e-9, atol=1e-9)
    saved, expected = part.state["optimizer"], whole.state["optimizer"]
    assert saved["state"].keys() == expected["state"].keys()
    assert saved["param_groups"][0]["params"] == expected["param_groups"][0]["params"]
