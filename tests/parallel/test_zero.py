"""parallel=zero beyond the parity matrix: how the optimizer state is divided, and checkpoints of other modes."""

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from ranks import run_ranks
from torch import nn
from worlds import Run, run, unconnected

from runner.input.batch import MicroBatch, StepBatch
from runner.objectives.supervised import Supervised
from runner.optimization.precision import Precision
from runner.parallel.zero import Zero
from runner.training.mode import Recipe

ADAMW = (
    *("model=toy", "data=toy", "data.num_train=350", "batch_size=90", "precision=fp64", "epochs=9", "logger=none"),
    "optimizer=adamw",
)


def test_the_optimizer_state_is_divided_among_the_ranks() -> None:
    def count(rank: int, world_size: int) -> tuple[int, list[str]]:
        world = unconnected(rank, world_size)
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(10, 10), nn.Linear(10, 5)).double()
        make = functools.partial(torch.optim.AdamW, lr=0.01)
        precision = Precision("fp64", world.device)
        sample = torch.zeros(1, 10, dtype=torch.float64)
        objective = Supervised(nn.MSELoss())
        model = Zero().prepare(Recipe(module, objective, make, precision, None, world.device, sample), world)
        batch = MicroBatch((torch.randn(4, 10).double(), torch.randn(4, 5).double()), range(4))
        (stepper,) = model.steppers.values()
        stepper.forward_backward(StepBatch([batch], 4 * world_size, 0.0))
        stepper.step(0.5, want_norm=False)
        local = model._local_optimizer
        assert local.param_groups[0]["lr"] == 0.005  # the schedule reaches the optimizer that steps
        numel = sum(t.numel() for state in local.state.values() for t in state.values() if t.dim())
        return numel, [name for name in model.state().chunks if name.endswith("exp_avg")]

    (numel_0, written_0), (numel_1, written_1) = run_ranks(count, 2)
    assert numel_0 + numel_1 == 2 * 165  # two moments of each parameter
    assert min(numel_0, numel_1) > 0
    assert len(written_0) + len(written_1) == len({*written_0, *written_1}) == 4  # each rank writes its own


@pytest.mark.thorough
def test_options_change_no_number(one_process: Callable[..., Run], tmp_path: Path) -> None:
    options = ("max_steps=10", "clip_grad_norm=0.1", "scheduler=cosine", "micro_batches=2")
    expected = one_process(*ADAMW, *options)
    made = run(tmp_path, 3, *ADAMW, *options, "parallel=zero", "parallel.parameters_as_bucket_view=true")
    assert made.losses == pytest.approx(expected.losses, rel=1e-9)
