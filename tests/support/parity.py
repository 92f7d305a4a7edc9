"""Small experiments of ten steps, and the comparison of a run with the one of a single process."""

from collections.abc import Callable, Iterable

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, default_collate
from worlds import Run

from runner.input.batch import cast_floating
from runner.input.pytree import map_tensors
from runner.objectives.supervised import call_model

# SGD with momentum, the default. 10 steps are two epochs or more. The last batch of an epoch does not split evenly.
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


def distance(one: Run, other: Run, names: Iterable[str]) -> float:
    return max((one.weights[name].double() - other.weights[name].double()).abs().max().item() for name in names)


def assert_equal(one: Run, reference: Run, tolerance: float = 1e-9) -> None:
    """Compare losses and gradient norms of all logged steps, weights and final metrics."""
    assert one.losses.keys() == reference.losses.keys() and one.losses
    assert one.losses == pytest.approx(reference.losses, rel=tolerance)
    assert one.grad_norms == pytest.approx(reference.grad_norms, rel=tolerance)
    torch.testing.assert_close(dict(one.weights), dict(reference.weights), rtol=0, atol=tolerance)
    assert one.result["metrics"] == pytest.approx(reference.result["metrics"], rel=tolerance)


def losses_of_a_plain_loop(
    model: nn.Module, dataset: Dataset, lr: float, num_steps: int, loss: Callable = nn.functional.mse_loss
) -> list[float]:
    """Train the model, with SGD as by default, on the whole dataset in each step. Return the losses."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    batch = default_collate([dataset[index] for index in range(len(dataset))])
    inputs, targets = map_tensors(lambda tensor: cast_floating(tensor, torch.float64), batch)
    losses = []
    for _ in range(num_steps):
        value = loss(call_model(model, inputs), targets)
        losses.append(value.item())
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
    return losses
