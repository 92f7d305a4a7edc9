"""Models in the style of other people's code train under sharded modes as in one process, or are refused before it."""

from pathlib import Path

import pytest
import torch
from mode_cases import Case
from parity import COMMON, assert_equal
from torch import Tensor, nn
from worlds import build_experiment, run

from runner.errors import InputError
from runner.parallel.fsdp import _units

TOY = ("data=toy", "data.num_train=90", "batch_size=90", *COMMON, "max_steps=3")


def of_model(name: str) -> tuple[str, ...]:
    return ("model=linear", f"model._target_=test_models_of_others.{name}", *TOY)


class Constants(nn.Module):
    """Keeps tensors as attributes, in containers, and in a module that is no submodule."""

    def __init__(self, sample_shape: list[int], num_outputs: int):
        super().__init__()
        size = sample_shape[0]
        self.scale = torch.rand(size)
        self.shifts = {"all": [torch.randn(size), (torch.ones(size), "text")]}
        self.teacher = [nn.Linear(size, size)]
        self.layers = nn.Sequential(nn.Linear(size, 8), nn.Tanh(), nn.Linear(8, num_outputs))
        self.norm = self.layers[0].weight.detach().norm()

    def forward(self, inputs: Tensor) -> Tensor:
        first, (second, _) = self.shifts["all"]
        taught = self.teacher[0](inputs.float()).detach().round(decimals=4)  # float32, which depends on the batch size
        return self.layers(inputs * self.scale + first + second + taught) / self.norm


class Scaling(nn.Module):
    def __init__(self, size: int):
        super().__init__()
        self.scale = torch.rand(size)

    def forward(self, features: Tensor) -> Tensor:
        return features * self.scale


class Staged(nn.Sequential):
    """Has a constant in one of its stages."""

    def __init__(self, sample_shape: list[int], num_outputs: int):
        size = sample_shape[0]
        super().__init__(Scaling(size), nn.Linear(size, 8), nn.Tanh(), nn.Linear(8, num_outputs))

    def stages(self) -> list[nn.Module]:
        return [*self]


class StagedOrthogonal(Staged):
    """Has a parametrization whose constructor catches the exception of an operator without a meta kernel."""

    def __init__(self, sample_shape: list[int], num_outputs: int):
        super().__init__(sample_shape, num_outputs)
        nn.utils.parametrizations.orthogonal(self[1])


class Closure(nn.Module):
    """Keeps a tensor in a closure that is called only in training."""

    def __init__(self, sample_shape: list[int], num_outputs: int):
        super().__init__()
        self.layer, scale = nn.Linear(sample_shape[0], num_outputs), torch.rand(sample_shape)
        self.augment = lambda inputs: inputs * scale

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layer(self.augment(inputs) if self.training else inputs)


class InPlace(nn.Module):
    """Has modules that write to their inputs, as their callers can see."""

    def __init__(self, sample_shape: list[int], num_outputs: int):
        super().__init__()
        self.first = nn.Linear(sample_shape[0], 8)
        self.block = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(8, 8))
        self.last = nn.Sequential(nn.Dropout(0.2, inplace=True), nn.Sequential(nn.Linear(8, num_outputs), nn.Tanh()))

    def forward(self, inputs: Tensor) -> Tensor:
        features = self.first(inputs)
        features = features + self.block(features)
        return self.last(features + self.block(features))


class Lookup(nn.Module):
    """Uses parameters of submodules, one of them only in training, without calling the submodules."""

    def __init__(self, sample_shape: list[int], num_outputs: int):
        super().__init__()
        self.place, self.gate = nn.Embedding(sample_shape[0], 1), nn.Linear(8, 8)
        self.embed = nn.Sequential(nn.Linear(sample_shape[0], 8), nn.Linear(8, num_outputs, bias=False))
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2))

    def forward(self, inputs: Tensor) -> Tensor:
        positions = torch.arange(inputs.size(1))
        features = self.embed[0](inputs + self.place.weight[positions].T)
        for block in self.blocks:
            features = block(features).to(self.gate.weight.dtype)
        if self.training:
            features = features + 0.1 * nn.functional.linear(features, self.gate.weight)
        return nn.functional.linear(self.gate(features), self.embed[1].weight)


class Inner(nn.Module):
    def __init__(self, size: int, num_outputs: int):
        super().__init__()
        self.first, self.body = nn.Linear(size, 8), nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        self.second = nn.Linear(8, num_outputs)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.second(self.body(self.first(inputs).relu()))


class Outer(nn.Module):
    """Calls the parts of a child; another child is called by its method."""

    def __init__(self, sample_shape: list[int], num_outputs: int):
        super().__init__()
        self.backbone = Inner(sample_shape[0], 8)
        self.head = Inner(8, num_outputs)

    def forward(self, inputs: Tensor) -> Tensor:
        features = self.backbone.second(self.backbone.body(self.backbone.first(inputs).relu()))
        return self.head.forward(features)


class Branches(nn.Module):
    """Does not use the output of the last module of a list, and calls a module in each iteration."""

    def __init__(self, sample_shape: list[int], num_outputs: int):
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleList([nn.Linear(10, 10), nn.Linear(10, 10)]) for _ in range(2))
        self.shared, self.head = nn.Sequential(nn.Linear(10, 10), nn.Tanh()), nn.Linear(10, num_outputs)

    def forward(self, inputs: Tensor) -> Tensor:
        tokens = inputs
        for first, second in self.layers:
            inputs = first(inputs + tokens)
            tokens = tokens + self.shared(inputs)
            inputs = second(inputs)
        return self.head(tokens)


class Recurrent(nn.Module):
    """Has a layer of torch that lists its parameters."""

    def __init__(self, sample_shape: list[int], num_outputs: int):
        super().__init__()
        self.layer, self.head = nn.LSTM(1, 8), nn.Linear(8, num_outputs)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.layer(inputs.T[..., None])[0][-1])


class Listed(nn.Linear):
    """Uses its parameters as items of a list."""

    def __init__(self, sample_shape: list[int], num_outputs: int):
        super().__init__(sample_shape[0], num_outputs)
        self.tensors = [self.weight, self.bias]

    def forward(self, inputs: Tensor) -> Tensor:
        return nn.functional.linear(inputs, *self.tensors)


def test_a_parameter_that_forward_finds_elsewhere_is_refused() -> None:
    with pytest.raises(InputError, match=r"parallel=fsdp: the forward of model=linear uses weight by a reference that"):
        build_experiment(*of_model("Listed"), "parallel=fsdp", world_size=2)


@pytest.mark.parametrize(
    ("name", "case"),
    [
        ("Constants", Case("fsdp", 2)),
        ("Closure", Case("fsdp", 2)),
        ("Staged", Case("pipeline", 2)),
        ("StagedOrthogonal", Case("fsdp", 2)),
        ("StagedOrthogonal", Case("pipeline", 2)),
        ("InPlace", Case("fsdp", 2)),
        ("InPlace", Case("none", 1, ("activation_checkpointing=full",))),
        ("Lookup", Case("fsdp", 2)),
        ("Outer", Case("mesh", 2, ("activation_checkpointing=full",))),
        ("Branches", Case("fsdp", 2)),
        ("Recurrent", Case("fsdp", 2)),
    ],
    ids=str,
)
def test_the_model_equals_one_process(name: str, case: Case, tmp_path: Path) -> None:
    made = run(tmp_path / "made", case.world_size, *of_model(name), *case.overrides)
    assert_equal(made, run(tmp_path, 1, *of_model(name), *case.reference))


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("Constants", None),
        ("Recurrent", None),
        ("Closure", "UninitializedTensor: forward uses a tensor that is found in no attribute of the model"),
        ("StagedOrthogonal", "NotImplementedError: aten::geqrf"),
    ],
)
def test_a_model_that_is_built_normally_is_named(name: str, reason: str | None) -> None:
    warnings = build_experiment(*of_model(name), "parallel=fsdp", world_size=2).warnings
    start = f"model=linear cannot be built on the meta device ({reason}"
    assert [warning[: len(start)] for warning in warnings] == ([start] if reason else [])


@pytest.mark.parametrize(
    ("name", "units"),
    [
        ("Lookup", [["embed.0"], ["blocks.0"], ["blocks.1"]]),
        ("Outer", [[f"{child}.{part}"] for child in ("backbone", "head") for part in ("first", "body", "second")]),
        ("InPlace", [["first"], ["block.1"], ["last.1"]]),
    ],
)
def test_units_are_modules_that_forward_uses_as_a_whole(name: str, units: list[list[str]]) -> None:
    module = build_experiment(*of_model(name), "parallel=fsdp", world_size=2).recipe.module
    names = {part: name for name, part in module.named_modules()}
    assert [[names[part] for part in unit] for unit in _units(module)] == units
