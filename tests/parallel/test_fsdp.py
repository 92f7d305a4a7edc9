"""parallel=fsdp: meshes, options, and checkpoints that other modes continue."""

from collections.abc import Callable
from pathlib import Path

import pytest
from parity import COMMON, EXPERIMENTS, assert_equal
from torch import nn
from torch.distributed.fsdp import FSDPModule
from worlds import Run, build_experiment, run

from runner.errors import InputError
from runner.parallel.fsdp import FSDP, _units

CONVNET = (*EXPERIMENTS["convnet"], *COMMON)
# Several micro-batches, and a norm over all shards that clips every step.
CLIPPED = (*CONVNET, "micro_batches=3", "clip_grad_norm=0.1")


@pytest.mark.thorough
def test_options_change_no_number(one_process: Callable[..., Run], tmp_path: Path) -> None:
    options = ("parallel.reshard_after_forward=false", "parallel.meta_init=false")
    assert_equal(run(tmp_path, 2, *CLIPPED, "parallel=fsdp", *options), one_process(*CLIPPED))


@pytest.mark.thorough
def test_checkpoint_moves_between_modes(one_process: Callable[..., Run], tmp_path: Path) -> None:
    """fsdp on two ranks, from mid-epoch ddp on two, then fsdp on one; evaluated in one process."""
    first = run(tmp_path, 2, *CLIPPED, "max_steps=4", "parallel=fsdp")
    run(tmp_path / "1", 2, f"resume='{first.path}'", "max_steps=7", "parallel=ddp")
    last = run(tmp_path / "2", 1, f"resume='{first.path}'", "max_steps=10", "parallel=fsdp")
    expected = one_process(*CLIPPED)
    assert_equal(last, expected)
    evaluated = run(tmp_path, 1, "task=evaluate", f"run='{first.path}'", "parallel=none", f"outputs={tmp_path}/e")
    assert evaluated.result["metrics"] == pytest.approx(
        {name: value for name, value in expected.result["metrics"].items() if name.startswith("val")}, rel=1e-9
    )


def test_bf16_is_close_to_one_process(one_process: Callable[..., Run], tmp_path: Path) -> None:
    overrides = (*CONVNET, "precision=bf16", "max_steps=4")
    two = run(tmp_path, 2, *overrides, "parallel=fsdp", "parallel.mixed_precision=true")
    assert two.losses == pytest.approx(one_process(*overrides).losses, rel=0.02)


def test_units_are_modules_that_forward_calls() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.out = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
            self.out.weight = self.embed.weight  # tied: neither can be gathered without the other
            self.blocks = nn.ModuleList([nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.ReLU())])
            self.relu = nn.ReLU()

    model = Model()
    assert list(_units(model)) == [[model.blocks[0]], [model.blocks[1]]]
    assert not isinstance(model.embed, FSDPModule)


def test_invalid_options_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^parallel.replicate=3 must divide the world of 4 ranks; try 2 or 4$"):
        FSDP(replicate=3).axes(4)
    with pytest.raises(ValueError, match=r"^parallel.replicate=2 must divide the world of 1 rank; try 1$"):
        FSDP(replicate=2).axes(1)
    with pytest.raises(InputError, match=r"parallel.mixed_precision=true computes in bfloat16"):
        build_experiment(*EXPERIMENTS["toy"], *COMMON, "parallel=fsdp", "parallel.mixed_precision=true", world_size=2)
