"""Models that use rarer features of torch train as in one process, or are refused before the run."""

from pathlib import Path

import pytest
import torch
from mode_cases import Case
from parity import COMMON
from ranks import RankError
from runner.shipped.data.toy import ToyRegression
from torch import Tensor, nn
from worlds import build_experiment, run

from runner.jobs.trained_model import load_trained

TOY = ("data=toy", "data.num_train=90", "batch_size=90", *COMMON, "max_steps=3")


def of_model(name: str) -> tuple[str, ...]:
    return ("model=linear", f"model._target_=test_unusual_models.{name}", *TOY)


class Rotary(nn.Module):
    """Rotates pairs of features by a complex buffer, as Llama's rotary embeddings do, and scales by a parameter."""

    def __init__(self, sample_shape: list[int], num_outputs: int):
        super().__init__()
        self.first, self.head = nn.Linear(sample_shape[0], 8), nn.Linear(8, num_outputs)
        self.register_buffer("freqs_cis", torch.polar(torch.ones(4), torch.arange(4.0)))
        self.scale = nn.Parameter(torch.polar(torch.ones(4), torch.full((4,), 0.5)))

    def forward(self, inputs: Tensor) -> Tensor:
        pairs = torch.view_as_complex(self.first(inputs).unflatten(1, (4, 2)))
        return self.head(torch.view_as_real(pairs * self.freqs_cis * self.scale).flatten(1))


@pytest.mark.parametrize("case", [Case("none", 1), Case("ddp", 2), Case("fsdp", 2)], ids=str)
def test_complex_tensors_equal_a_plain_loop(case: Case, tmp_path: Path) -> None:
    made = run(tmp_path, case.world_size, *of_model("Rotary"), *case.overrides)
    torch.manual_seed(0)
    model = Rotary([10], 5)
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = tensor.data.to(torch.complex128 if tensor.is_complex() else torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    data = ToyRegression(True, [10], 5, num_train=90)
    inputs, targets = (torch.stack(column).double() for column in zip(*data, strict=True))
    for step in (1, 2, 3):
        loss = nn.functional.mse_loss(model(inputs), targets)
        assert made.losses[step] == pytest.approx(loss.item(), rel=1e-9)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    expected = model.state_dict()
    loaded = load_trained(made.path).state_dict()
    for name, tensor in expected.items():
        torch.testing.assert_close(made.weights[name], tensor, rtol=0, atol=1e-9)
        torch.testing.assert_close(loaded[name], tensor, rtol=0, atol=1e-9)


class Odd(nn.Linear):
    """Has buffers that a conversion to float32 rounds, keeps, or decodes."""

    def __init__(self, sample_shape: list[int], num_outputs: int):
        super().__init__(sample_shape[0], num_outputs)
        self.register_buffer("fine", torch.tensor([0.1], dtype=torch.float64), persistent=False)
        self.register_buffer("whole", torch.tensor([3.0, torch.nan], dtype=torch.float64), persistent=False)
        self.register_buffer("small", torch.tensor([0.5]).to(torch.float8_e4m3fn), persistent=False)


def test_tensors_that_do_not_keep_their_values_are_named() -> None:
    words = of_model("Odd")
    (warning,) = build_experiment(*words, "precision=fp32").warnings
    assert warning.startswith("precision=fp32: fine, small of model=linear had another dtype")
    (warning,) = build_experiment(*words).warnings
    assert warning.startswith("precision=fp64: small of model=linear")


class Replaces(nn.Module):
    """Replaces a layer in the second training step."""

    def __init__(self, sample_shape: list[int], num_outputs: int):
        super().__init__()
        self.first, self.head, self.calls = nn.Linear(sample_shape[0], 8), nn.Linear(8, num_outputs), 0

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls += self.training
        if self.calls == 3:  # one call was that of the dry run
            self.head = nn.Linear(8, self.head.out_features, dtype=inputs.dtype)
        return self.head(self.first(inputs))


@pytest.mark.fault("a model that replaces a layer in forward", outcome="refused")
@pytest.mark.parametrize("case", [Case("none", 1), Case("ddp", 2)], ids=str)
def test_a_replaced_parameter_is_named(case: Case, tmp_path: Path) -> None:
    with pytest.raises(
        RankError, match=r"JobFailed: rank . on .*:\nthe model has replaced the parameter head.weight of a"
    ):
        run(tmp_path, case.world_size, *of_model("Replaces"), *case.overrides)
