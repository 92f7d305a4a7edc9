"""Attention under autocast on the CPU, which is computed in float32 where the CPU has no tiles for bfloat16."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from runner.optimization.precision import Precision
from runner.training.model.activation_checkpointing import checkpoint_activations

CPU = torch.device("cpu")
SHAPE = (2, 4, 5, 8)  # batch, heads, positions, dim
MASK = torch.randn(5, 5, generator=torch.Generator().manual_seed(9))


def drawn(seed: int) -> Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def attention(precision: str, options: dict[str, Any]) -> tuple[Tensor, list[Tensor]]:
    """Its output, and the gradients of its sum of squares."""
    inputs = [drawn(seed) for seed in range(3)]
    with Precision(precision, CPU).autocast():
        output = F.scaled_dot_product_attention(*inputs, **options)
    output.float().square().sum().backward()
    return output, [each.grad for each in inputs if each.grad is not None]


@pytest.fixture
def no_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)


@pytest.mark.usefixtures("no_tiles")
@pytest.mark.parametrize(
    ("precision", "dtype", "options"),
    [("bf16", torch.bfloat16, {"is_causal": True}), ("fp16", torch.float16, {"attn_mask": MASK > 0})],
)
def test_attention_under_autocast_is_rounded_once_on_a_cpu_without_tiles(
    precision: str, dtype: torch.dtype, options: dict[str, Any]
) -> None:
    output, gradients = attention(precision, options)
    whole, expected = attention("fp32", options)
    assert output.dtype == dtype and whole.dtype == torch.float32
    assert torch.equal(output, whole.to(dtype))
    for found, right in zip(gradients, expected, strict=True):
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, right, rtol=0.02, atol=0.02)  # the squares are of rounded numbers


def test_a_cpu_with_tiles_computes_attention_in_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    output, _ = attention("bf16", {})
    inputs = [drawn(seed).bfloat16() for seed in range(3)]
    assert torch.equal(output, F.scaled_dot_product_attention(*inputs))


@pytest.mark.usefixtures("no_tiles")
def test_attention_without_autocast_is_unchanged() -> None:
    """Also where a model disables autocast, and with float64, which autocast does not change."""
    inputs = [drawn(seed) for seed in range(3)]
    wide = [each.double() for each in inputs]
    expected, exact = F.scaled_dot_product_attention(*inputs), F.scaled_dot_product_attention(*wide)
    with Precision("bf16", CPU).autocast():
        with torch.autocast("cpu", enabled=False):
            output = F.scaled_dot_product_attention(*inputs)
        of_wide = F.scaled_dot_product_attention(wide[0], wide[1], value=wide[2])
    assert output.dtype == torch.float32 and torch.equal(output, expected)
    assert of_wide.dtype == torch.float64 and torch.equal(of_wide, exact)


class Attending(nn.Sequential):
    def forward(self, inputs: Tensor) -> Tensor:
        inner = super().forward(inputs)
        return F.scaled_dot_product_attention(inner, inner, inner)


@pytest.mark.usefixtures("no_tiles")
def test_attention_is_equal_in_a_recomputed_block() -> None:
    found = []
    for extent in ("none", "full"):
        torch.manual_seed(0)
        model = nn.Sequential(Attending(nn.Linear(8, 8), nn.Tanh()), nn.Linear(8, 1))
        checkpoint_activations(model, extent)
        with Precision("bf16", CPU).autocast():
            loss = model(torch.randn(2, 5, 8)).float().square().mean()
        loss.backward()
        found.append([loss.detach(), *(parameter.grad for parameter in model.parameters())])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.usefixtures("no_tiles")
def test_a_compiled_model_has_the_same_attention() -> None:
    inputs = [drawn(seed).detach() for seed in range(3)]
    compiled = torch.compile(F.scaled_dot_product_attention, backend="aot_eager")
    with Precision("bf16", CPU).autocast():
        assert torch.equal(compiled(*inputs), F.scaled_dot_product_attention(*inputs))
        assert compiled(*inputs).dtype == torch.bfloat16
