"""Models whose forward changes more than buffers: the dry runs leave no trace, and checkpoints contain extra states."""

from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mode_cases import Case
from parity import COMMON, assert_equal, losses_of_a_plain_loop
from runner.shipped.data.toy import ToyRegression
from torch import Tensor, nn
from worlds import Run, build_experiment, run

from runner.errors import InputError
from runner.jobs.trained_model import load_trained

TOY = ("data=toy", "data.num_train=90", "batch_size=90", *COMMON, "max_steps=4")


def of_model(name: str) -> tuple[str, ...]:
    return ("model=linear", f"model._target_=test_stateful_models.{name}", *TOY)


class Counter:
    def __init__(self) -> None:
        self.calls = 0


class Warm(nn.Module):
    """Scales its outputs by the number of training steps, which it counts in attributes of many types."""

    def __init__(self, sample_shape: list[int], num_outputs: int):
        super().__init__()
        self.layer, self.norm = nn.Linear(sample_shape[0], num_outputs), nn.BatchNorm1d(num_outputs)
        self.number, self.tensor, self.array = 0, torch.zeros(()), np.zeros(2)
        self.written, self.listed, self.queue = torch.zeros(2), [0], deque([1], maxlen=3)
        self.nested: dict[str, Any] = {"set": {0}, "list": [torch.zeros(()), Counter()]}
        self.hidden = [nn.Linear(1, 1).requires_grad_(False)]  # not registered

    def count(self) -> None:
        self.number += 1
        self.tensor = self.tensor + 1
        self.array += 1
        self.written += 1
        self.listed.append(len(self.listed))
        self.queue.append(self.queue[-1] + 1)
        self.nested["set"].add(self.number)
        self.nested["list"][0].add_(1)
        self.nested["list"][1].calls += 1
        self.nested["other"] = self.number
        self.hidden[0].weight.data = self.hidden[0].weight.data + 1

    @property
    def steps(self) -> float:
        nested = len(self.nested["set"]) + self.nested["list"][0] + self.nested["list"][1].calls
        counts = self.number + self.tensor + self.array.sum() + self.written.sum() + len(self.listed) + self.queue[-1]
        return float(counts + nested + self.nested.get("other", 0) + self.hidden[0].weight)

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.count()
        return self.norm(self.layer(inputs)) * self.steps / 100


class Taught(nn.Module):
    """Has a frozen moving average of its layer, which forward updates in training."""

    def __init__(self, sample_shape: list[int], num_outputs: int, replaces: bool = False):
        super().__init__()
        self.student, self.replaces = nn.Linear(sample_shape[0], num_outputs), replaces
        self.teacher = nn.Linear(sample_shape[0], num_outputs).requires_grad_(False)

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                for average, weight in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                    if self.replaces:
                        average.data = average.data * 0.5 + weight.data * 0.5
                    else:
                        average.mul_(0.5).add_(weight, alpha=0.5)
        return self.student(inputs) + self.teacher(inputs)


def toy_losses(model: nn.Module) -> list[float]:
    return losses_of_a_plain_loop(model.double(), ToyRegression(True, [10], 5, 90), lr=0.01, num_steps=4)


def log_of(made: Run) -> str:
    return (made.path / "log.txt").read_text()


@pytest.mark.parametrize("case", [Case("none", 1), Case("ddp", 2)], ids=str)
def test_state_of_many_types_equals_a_plain_loop(case: Case, tmp_path: Path) -> None:
    made = run(tmp_path, case.world_size, *of_model("Warm"), *case.overrides)
    torch.manual_seed(0)
    expected = toy_losses(Warm([10], 5))
    assert [*made.losses.values()] == pytest.approx(expected, rel=1e-9)
    (warning,) = [line for line in log_of(made).splitlines() if "no checkpoint contains" in line]
    assert "model=linear: forward changes the attribute number, tensor, " in warning
    assert "define get_extra_state and set_extra_state" in warning


class InBlock(nn.Module):
    def __init__(self, sample_shape: list[int], num_outputs: int):
        super().__init__()
        self.block = nn.Sequential(Warm(sample_shape, num_outputs))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.block(inputs)


def test_recomputed_and_replayed_passes_change_the_state_once(tmp_path: Path) -> None:
    torch.manual_seed(0)
    expected = toy_losses(Warm([10], 5))
    made = run(tmp_path, 1, *of_model("InBlock"), "activation_checkpointing=full", "replay_every_steps=2")
    assert [*made.losses.values()] == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(
    ("case", "replaces"),
    [
        (Case("none", 1), False),
        (Case("ps", 3), False),
        (Case("ddp", 2), True),
        pytest.param(Case("zero", 2), False, marks=pytest.mark.thorough),
        pytest.param(Case("local_sgd", 2), False, marks=pytest.mark.thorough),
    ],
    ids=str,
)
def test_a_teacher_that_forward_updates(case: Case, replaces: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Taught([10], 5)
    expected = toy_losses(model)
    words = (*of_model("Taught"), f"+model.replaces={str(replaces).lower()}")
    made = run(tmp_path, case.world_size, *words, *case.overrides)
    assert [*made.losses.values()] == pytest.approx(expected, rel=1e-9)
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(made.weights[name], tensor, rtol=0, atol=1e-9)
    assert "no checkpoint contains" not in log_of(made) and "differ between ranks" not in log_of(made)


@pytest.mark.parametrize("replaces", ["true", "false"])
@pytest.mark.parametrize("meta_init", ["true", "false"])
def test_a_teacher_that_would_be_sharded_is_refused(replaces: str, meta_init: str) -> None:
    words = (*of_model("Taught"), f"+model.replaces={replaces}", "parallel=fsdp", f"parallel.meta_init={meta_init}")
    with pytest.raises(InputError, match=r"parallel=fsdp: .* changes the parameter teacher.weight, .* parallel=ddp"):
        build_experiment(*words, world_size=2)


class Constrained(nn.Linear):
    """Bounds its weight in training, without an operator that autograd would notice."""

    def __init__(self, sample_shape: list[int], num_outputs: int):
        super().__init__(sample_shape[0], num_outputs)

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.weight.data = torch.renorm(self.weight.data, 2, 0, 0.5)
        return super().forward(inputs)


@pytest.mark.parametrize("mode", ["fsdp", "ps"])
def test_a_trained_parameter_that_only_training_writes_is_refused(mode: str) -> None:
    with pytest.raises(InputError, match=rf"parallel={mode}: .* changes the parameter weight, .* try parallel=ddp"):
        build_experiment(*of_model("Constrained"), f"parallel={mode}", world_size=2)


def test_a_bounded_weight_equals_a_plain_loop(tmp_path: Path) -> None:
    made = run(tmp_path, 2, *of_model("Constrained"), "parallel=ddp")
    torch.manual_seed(0)
    expected = toy_losses(Constrained([10], 5))
    assert [*made.losses.values()] == pytest.approx(expected, rel=1e-9)


class OfBatch(Taught):
    """Has a frozen parameter that forward computes from the samples of the rank."""

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.teacher.weight.data.mul_(0.5).add_(inputs.mean(0), alpha=0.5)
        return self.student(inputs) + self.teacher(inputs)


class Cooling(nn.Module):
    """Lowers a temperature in each training step, and saves it as an extra state."""

    def __init__(self, kind: str):
        super().__init__()
        self.tau, self.kind = 2.0, kind

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.tau *= 0.9
        return inputs / self.tau

    def get_extra_state(self) -> Any:
        if self.kind == "number":
            return self.tau
        tensor = torch.tensor(self.tau, dtype=torch.float64)
        return tensor if self.kind == "tensor" else {"tau": (self.tau, [tensor]), 1: np.array([self.tau]), "set": {1}}

    def set_extra_state(self, state: Any) -> None:
        if self.kind == "dict":
            assert isinstance(state["tau"], tuple) and state["set"] == {1} and isinstance(state[1], np.ndarray)
            assert state["tau"][0] == state["tau"][1][0] == state[1][0]
            state = state["tau"][0]
        self.tau = float(state)


class Annealed(nn.Module):
    def __init__(self, sample_shape: list[int], num_outputs: int):
        super().__init__()
        self.first, self.last = nn.Linear(sample_shape[0], 8), nn.Linear(8, num_outputs)
        self.number, self.tensor, self.dict = Cooling("number"), Cooling("tensor"), Cooling("dict")

    def stages(self) -> list[nn.Module]:
        return [nn.Sequential(self.first, self.number), nn.Sequential(self.tensor, nn.Tanh(), self.dict, self.last)]

    def forward(self, inputs: Tensor) -> Tensor:
        for stage in self.stages():
            inputs = stage(inputs)
        return inputs


@pytest.mark.parametrize(
    "case",
    [
        Case("none", 1),
        Case("fsdp", 2),
        Case("pipeline", 2),
        Case("ps", 3),
        pytest.param(Case("ddp", 2), marks=pytest.mark.thorough),
        pytest.param(Case("zero", 2), marks=pytest.mark.thorough),
        pytest.param(Case("local_sgd", 2), marks=pytest.mark.thorough),
    ],
    ids=str,
)
def test_an_extra_state_is_resumed(case: Case, tmp_path: Path) -> None:
    words = (*of_model("Annealed"), *case.overrides)
    part = run(tmp_path / "part", case.world_size, *words, "max_steps=2")
    resumed = run(tmp_path / "part", case.world_size, f"resume={part.path}", "max_steps=4")
    whole = run(tmp_path, case.world_size, *words)
    assert_equal(resumed, whole)
    assert_equal(whole, run(tmp_path / "one", 1, *of_model("Annealed"), *case.reference))
    assert "no checkpoint contains" not in log_of(whole) and "differ between ranks" not in log_of(whole)
    model, forwards = load_trained(whole.path), 4 * (4 if case.mode == "pipeline" else 1)
    assert [model.number.tau, model.tensor.tau, model.dict.tau] == pytest.approx([2.0 * 0.9**forwards] * 3)


class Opaque(Cooling):
    def __init__(self, sample_shape: list[int], num_outputs: int):
        super().__init__("number")
        self.layer = nn.Linear(sample_shape[0], num_outputs)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layer(inputs)

    def get_extra_state(self) -> Any:
        return {"counter": Counter()}


def test_an_extra_state_of_another_type_is_refused() -> None:
    with pytest.raises(InputError, match=r"model=linear: _extra_state.counter of get_extra_state is a Counter, which"):
        build_experiment(*of_model("Opaque"))


@pytest.mark.parametrize("name", ["OfBatch", "ExtraOfBatch"])
def test_state_that_differs_between_ranks_is_reported(name: str, tmp_path: Path) -> None:
    made = run(tmp_path, 2, *of_model(name), "parallel=ddp", "max_steps=1")
    assert " differ between ranks after step 1: " in log_of(made)


class ExtraOfBatch(Cooling):
    """Has an extra state that forward computes from the samples of the rank."""

    def __init__(self, sample_shape: list[int], num_outputs: int):
        super().__init__("number")
        self.layer = nn.Linear(sample_shape[0], num_outputs)

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.tau = inputs.mean().item()
        return self.layer(inputs) * self.tau
