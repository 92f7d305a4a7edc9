"""The state that an additional forward pass must not change, and submodules that an objective adds to a model."""

import copy
import random
from typing import Any

import numpy as np
import torch
from torch import nn

from runner import Objective
from runner.input.batch import MicroBatch, StepBatch
from runner.optimization.precision import Precision
from runner.parallel.replica import Replica
from runner.training.mode import Recipe
from runner.training.model.submodules import attach_submodule


class Counting(nn.Module):
    """A model with everything that a forward pass may change."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)
        self.register_buffer("seen", torch.zeros(()))
        self.calls, self.generator = 0, torch.Generator().manual_seed(0)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.seen = self.seen + 1
        self.calls += 1
        torch.rand((), generator=self.generator)
        return self.layer(inputs)


class Terms(Objective):
    def __init__(self) -> None:
        self.terms, self.calls = {"size": 1.0}, 0
        self.drawn: list[tuple[float, float, float]] = []  # of each pass

    def loss(self, model: Any, batch: Any) -> Any:
        self.calls += 1
        self.drawn.append((np.random.random(), random.random(), torch.rand(()).item()))
        return {"size": (model(batch).square().sum(), len(batch))}


def test_the_additional_pass_of_terms_is_undone() -> None:
    torch.manual_seed(0)
    model, objective, cpu = Counting(), Terms(), torch.device("cpu")
    recipe = Recipe(model, objective, lambda p: torch.optim.SGD(p, 0.1), Precision("fp32", cpu), None, cpu, None)
    parts = [MicroBatch(torch.randn(2, 2), [0, 1]), MicroBatch(torch.randn(2, 2), [2, 3])]
    Replica(recipe, torch.optim.SGD(model.parameters(), 0.1)).forward_backward(StepBatch(parts, 4, 0.0))
    assert (model.seen.item(), model.calls, objective.calls) == (2, 2, 2)
    assert objective.drawn[:2] == objective.drawn[2:]
    expected = torch.Generator().manual_seed(0)
    for _ in parts:
        torch.rand((), generator=expected)
    assert torch.equal(model.generator.get_state(), expected.get_state())


def test_a_sequential_model_does_not_call_the_objective_that_is_added_to_it() -> None:
    class Model(nn.Sequential):
        pass

    model, inputs = Model(nn.Linear(2, 3), nn.ReLU()), torch.randn(4, 2)
    expected = model(inputs)
    attach_submodule(model, "objective", nn.Bilinear(3, 3, 1))
    assert torch.equal(model(inputs), expected) and torch.equal(copy.deepcopy(model)(inputs), expected)
    assert len(model) == 2 and isinstance(model, Model) and "objective.weight" in model.state_dict()
