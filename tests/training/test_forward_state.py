"""The state that an additional forward pass must not change, and submodules that an objective adds to a model."""

import argparse
import copy
import random
from collections import defaultdict, deque
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn

from runner import Objective
from runner.input.batch import MicroBatch, StepBatch
from runner.optimization.precision import Precision
from runner.parallel.loss_groups import prepare_loss_groups
from runner.parallel.replica import Replica
from runner.training.mode import Recipe
from runner.training.model.forward_state import ForwardState, mark_as_stateful, restoring_all
from runner.training.model.object_state import ObjectState, frozen_value
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


class Saving(nn.Module):
    """A model of two layers with an extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.calls = nn.Linear(2, 2), nn.Linear(2, 1), torch.zeros(2)

    def get_extra_state(self) -> Any:
        return {"calls": self.calls}

    def set_extra_state(self, state: Any) -> None:
        self.calls = state["calls"]


def test_an_extra_state_is_stored_once_for_several_losses() -> None:
    class Two(Objective):
        losses: ClassVar[dict[str, str]] = {"one": "first", "two": "last"}

    model, cpu = Saving(), torch.device("cpu")
    recipe = Recipe(model, Two(), lambda p: torch.optim.SGD(p, 0.1), Precision("fp32", cpu), None, cpu, None)
    made = prepare_loss_groups(recipe, lambda group: Replica(recipe, torch.optim.SGD(group.parameters, 0.1), group))
    state = made.state()
    assert state.facts["extra_state"] == {"_extra_state": {"dict": [["calls", {"tensor": "_extra_state.calls"}]]}}
    assert "extra_state._extra_state.calls" in state.chunks
    weights = made.weights()
    assert torch.equal(weights["_extra_state"]["calls"], model.calls) and weights.keys() == model.state_dict().keys()


class Listing(nn.Module):
    """A model with state that is restored only if it is marked."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher, self.inner = nn.Linear(2, 1).requires_grad_(False), nn.BatchNorm1d(2)
        self.tensor, self.nested = torch.zeros(2), {"calls": [0], "tensor": torch.zeros(1)}

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.teacher.weight.data.add_(1)
        self.tensor.add_(1)
        self.tensor, self.new = self.tensor + 1, 1
        self.nested["calls"].append(1)
        self.nested["tensor"].mul_(2).add_(1)
        return self.teacher(self.inner(inputs))


def test_all_state_of_marked_objects_is_restored() -> None:
    model, inputs = Listing(), torch.randn(4, 2)
    mark_as_stateful(model)
    mark_as_stateful(model.teacher)
    before, tensors = copy.deepcopy(vars(model)), (model.tensor, model.nested["tensor"])
    state = ForwardState(model)
    first = model(inputs)
    state.restore()
    assert model.nested["calls"] == [0] and not hasattr(model, "new") and model.tensor is tensors[0]
    assert model.nested["tensor"] is tensors[1] and not any(tensor.any() for tensor in tensors)
    torch.testing.assert_close(model.state_dict(), before["_modules"] and _state_dict(before), rtol=0, atol=0)
    assert torch.equal(model(inputs), first)


def _state_dict(attributes: dict[str, Any]) -> dict[str, torch.Tensor]:
    modules = attributes["_modules"].items()
    return {f"{name}.{key}": value for name, module in modules for key, value in module.state_dict().items()}


def test_contents_of_many_types_are_restored_in_place() -> None:
    part: Any = nn.Linear(1, 1)
    part.options, part.lists, part.queue = argparse.Namespace(sizes=[1]), defaultdict(list), deque([1], maxlen=3)
    part.set, part.array, part.nested, part.itself = {1, 2}, np.zeros(2), (torch.zeros(1), frozenset({3})), part
    part.numpy, part.old, part.python = np.random.default_rng(0), np.random.RandomState(0), random.Random(0)
    names = {*vars(part)} - {*vars(nn.Linear(1, 1))} - {"itself"}
    before = {name: frozen_value(getattr(part, name)) for name in names}
    state = ObjectState([part])
    assert state.changed() == []
    with state.saving_writes():
        for change in (part.numpy.random, part.old.rand, part.python.random):
            change()
        for change in (part.options.sizes.append, part.lists["new"].append, part.queue.append, part.set.add):
            change(5)
        part.array[0], part.new = np.nan, 4
        part.nested[0].add_(1)
    assert {attribute.name for attribute in state.changed()} == names | {"new"}
    assert all(frozen_value(getattr(part, name)) != before[name] for name in names)
    state.restore()
    assert before == {name: frozen_value(getattr(part, name)) for name in names} and not hasattr(part, "new")


def test_a_pass_before_the_run_copies_only_what_it_writes() -> None:
    """A module that registers tensors in its first forward keeps them, and a lazy one its parameters."""

    class Growing(Listing):
        def __init__(self) -> None:
            super().__init__()
            self.lazy = nn.LazyLinear(1)
            self.late = nn.Identity()

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            if not hasattr(self.late, "layer"):
                self.late.layer = nn.Linear(2, 1)
            return super().forward(inputs) + self.lazy(inputs) + self.late.layer(inputs)

    model = Growing()
    weight = model.teacher.weight.clone()
    with restoring_all(model, Terms()):
        model(torch.randn(4, 2))
    assert model.nested["calls"] == [0] and torch.equal(model.teacher.weight, weight)
    layer = model.late.layer
    assert isinstance(model.lazy, nn.Linear) and model.lazy.weight.shape == (1, 2)
    model(torch.randn(4, 2))
    assert model.late.layer is layer


def test_a_sequential_model_does_not_call_the_objective_that_is_added_to_it() -> None:
    class Model(nn.Sequential):
        pass

    model, inputs = Model(nn.Linear(2, 3), nn.ReLU()), torch.randn(4, 2)
    expected = model(inputs)
    attach_submodule(model, "objective", nn.Bilinear(3, 3, 1))
    assert torch.equal(model(inputs), expected) and torch.equal(copy.deepcopy(model)(inputs), expected)
    assert len(model) == 2 and isinstance(model, Model) and "objective.weight" in model.state_dict()
