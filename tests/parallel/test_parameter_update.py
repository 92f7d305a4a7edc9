"""An optimizer step of a rank: sums over ranks, learning rate, norm, clipping, and memory layouts."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from one_machine import on_ranks
from torch import nn

from runner.checkpoints.layout import TrainState
from runner.checkpoints.save import save
from runner.checkpoints.save_coordination import SaveCoordinator
from runner.checkpoints.saved_state import MODEL, LocalState, SavedState
from runner.checkpoints.shard_file import LocalChunk
from runner.distributed.world import World
from runner.optimization.precision import Precision
from runner.parallel.optimizer_state import load_optimizer_state, optimizer_state
from runner.parallel.parameter_update import ParameterUpdate, sum_gradients, weight_factor

FP32 = Precision("fp32", torch.device("cpu"))


def parameters(*gradients: Iterable[float] | None) -> list[nn.Parameter]:
    made = []
    for gradient in gradients:
        made.append(nn.Parameter(torch.zeros(2)))
        made[-1].grad = None if gradient is None else torch.tensor(list(gradient))
    return made


def test_a_step_follows_the_schedule_and_returns_the_norm() -> None:
    own = parameters((3.0, 0.0), (0.0, 4.0), None)
    update = ParameterUpdate(torch.optim.SGD(own, lr=0.5), dict(zip("abc", own, strict=True)), FP32)
    assert update.step(0.2, want_norm=True) == pytest.approx(5.0)
    assert update.learning_rate == pytest.approx(0.1)
    assert [p.tolist() for p in own] == [pytest.approx([-0.3, 0]), pytest.approx([0, -0.4]), [0, 0]]
    assert all(p.grad is None for p in own)
    assert update.step(1.0, want_norm=False) is None


def test_a_gradient_is_clipped_by_the_norm_of_the_whole() -> None:
    own = parameters((3.0, 0.0), (0.0, 4.0))
    named = dict(zip("ab", own, strict=True))
    update = ParameterUpdate(torch.optim.SGD(own, lr=1.0), named, FP32, clip_grad_norm=1.0)
    assert update.step(1.0, want_norm=True) == pytest.approx(5.0)  # before clipping
    assert torch.stack([p.detach() for p in own]).norm().item() == pytest.approx(1.0, rel=1e-4)


def test_a_loaded_optimizer_state_has_the_strides_of_its_parameter(tmp_path: Path) -> None:
    module = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
    optimizer = torch.optim.Adam(module.parameters(), lr=0.1, fused=True)
    module(torch.randn(2, 3, 5, 5)).sum().backward()
    optimizer.step()
    path = save(tmp_path, optimizer_state(module, optimizer), TrainState(1, 0, 1, batch_size=1), SaveCoordinator())
    again = torch.optim.Adam(module.parameters(), lr=0.1, fused=True)
    load_optimizer_state(module, again, SavedState.open(path))
    for parameter in module.parameters():
        for key, tensor in optimizer.state[parameter].items():
            assert torch.equal(again.state[parameter][key], tensor)
            assert again.state[parameter][key].stride() == tensor.stride(), key


@pytest.mark.parametrize("name", ["NAdam", "ASGD"])
def test_a_loaded_optimizer_state_has_its_own_dtypes(name: str, tmp_path: Path) -> None:
    """torch would convert all of it to the parameter's dtype, but these optimizers compute parts of it in float32."""
    module, make = nn.Linear(3, 2).double(), getattr(torch.optim, name)
    optimizer = make(module.parameters(), lr=0.1)
    module(torch.randn(2, 3, dtype=torch.float64)).sum().backward()
    optimizer.step()
    model = LocalState({MODEL + name: LocalChunk.of(p) for name, p in module.named_parameters()})
    saved = optimizer_state(module, optimizer) | model
    path = save(tmp_path, saved, TrainState(1, 0, 1, batch_size=1), SaveCoordinator())
    again = make(module.parameters(), lr=0.1)
    load_optimizer_state(module, again, SavedState.open(path))
    for parameter in module.parameters():
        torch.testing.assert_close(again.state[parameter], optimizer.state[parameter], rtol=0, atol=0)
    changed = nn.Linear(3, 2)  # in another precision, the state has that of the parameters
    again = make(changed.parameters(), lr=0.1)
    load_optimizer_state(changed, again, SavedState.open(path))
    changed(torch.randn(2, 3)).sum().backward()
    again.step()


def test_gradients_are_summed_over_ranks_that_use_different_parameters(tmp_path: Path) -> None:
    """Parameters that no rank uses have none; sparse gradients become dense; there are several dtypes."""

    def act(world: World) -> list[Any]:
        used_by_all, used_by_one, used_by_none = parameters(None, None, None)
        double, embedding = nn.Parameter(torch.ones((), dtype=torch.float64)), nn.Embedding(4, 2, sparse=True)
        used_by_all.grad, double.grad = torch.full((2,), 2.0 + world.rank), torch.ones_like(double)
        if world.rank == 0:
            used_by_one.grad = torch.zeros(2)  # used, but without an effect
            embedding(torch.tensor([1, 1, 3])).sum().backward()
        trained = (used_by_all, used_by_one, used_by_none, double, embedding.weight)
        sum_gradients(trained, world.collectives.sum)
        return [parameter.grad for parameter in trained]

    for of_all, of_one, of_none, of_double, of_embedding in on_ranks(tmp_path, 2, act):
        assert torch.equal(of_all, torch.full((2,), 5.0)) and torch.equal(of_one, torch.zeros(2)) and of_none is None
        assert torch.equal(of_double, torch.tensor(2.0, dtype=torch.float64))
        assert torch.equal(of_embedding, torch.tensor([0.0, 2.0, 0.0, 1.0])[:, None].expand(4, 2))


def test_the_gradient_scaler_is_updated_after_each_step() -> None:
    """The scale doubles after `growth_interval` finite steps. An infinite gradient halves it and skips the step."""
    parameter = nn.Parameter(torch.ones(2))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1)
    precision = Precision("fp32", torch.device("cpu"))
    precision.scaler = scaler
    update = ParameterUpdate(torch.optim.SGD([parameter], lr=1.0), {"weight": parameter}, precision)
    scaler.scale(parameter.sum()).backward()
    assert update.step(1.0, want_norm=True) == pytest.approx(2**0.5)  # of the gradient without the scale
    assert scaler.get_scale() == 8.0 and parameter.tolist() == [0.0, 0.0]
    scaler.scale(parameter.sum() * torch.inf).backward()
    update.step(1.0, want_norm=False)
    assert scaler.get_scale() == 4.0 and parameter.tolist() == [0.0, 0.0]


def test_a_step_without_weight_has_the_factor_0() -> None:
    """If all targets of a step are ignored, its gradients are 0, and not 0 times infinity."""
    factors = [weight_factor(6, torch.tensor(weight, dtype=torch.float64), torch.clone) for weight in (0.0, 3.0)]
    assert [factor.item() for factor in factors] == [0.0, 2.0]
