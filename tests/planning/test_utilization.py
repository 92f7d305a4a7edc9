"""The shortest time of a sample on a GPU, compared with FLOPs that are counted by hand."""

import pytest
import torch
from torch import nn

from runner.objectives.supervised import Supervised
from runner.planning.utilization import shortest_seconds

RATES = {"fp32": 1e9, "tf32": 1e10, "bf16": 1e11}


def seconds(
    model: nn.Module, inputs: torch.Tensor, precision: str, frozen: tuple[str, ...] = (), **tf32: bool | str
) -> float:
    objective = Supervised(nn.MSELoss())
    with torch.device("meta"):
        targets = model.to("meta")(inputs.to("meta"))
    state = torch.get_rng_state()

    def make() -> nn.Module:
        torch.rand(())
        return model.requires_grad_()

    found = shortest_seconds(make, [*frozen], objective, (inputs, torch.zeros(targets.shape)), RATES, precision, **tf32)
    assert torch.equal(torch.get_rng_state(), state)
    return found


def test_two_layers_are_counted_forward_and_backward_per_sample() -> None:
    """The first layer needs no gradient of its input, and none of its weights if it is frozen."""
    first, second = 2 * 4 * 8, 2 * 8 * 3  # FLOPs of a sample
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    assert seconds(model, torch.rand(2, 4), "fp32") == pytest.approx((2 * first + 3 * second) / 1e9, rel=1e-9, abs=0)
    assert seconds(model, torch.rand(1, 4), "bf16") == pytest.approx((2 * first + 3 * second) / 1e11, rel=1e-9, abs=0)
    assert seconds(model, torch.rand(2, 4), "fp32", (r"^0\.",)) == pytest.approx(
        (first + 2 * second) / 1e9, rel=1e-9, abs=0
    )


def test_convolutions_in_fp32_compute_in_tf32_as_by_default_on_gpus() -> None:
    model = nn.Conv2d(1, 2, 3, bias=False)
    assert seconds(model, torch.rand(2, 1, 8, 8), "fp32") == pytest.approx(2 * (2 * 2 * 36 * 9) / 1e10, rel=1e-9, abs=0)


def test_tf32_is_used_for_all_matrices_or_for_none() -> None:
    model, flops = nn.Sequential(nn.Conv2d(1, 2, 3, bias=False), nn.Flatten(), nn.Linear(72, 3)), [2 * 2 * 36 * 9 * 2]
    flops.append(3 * 2 * 72 * 3)
    for tf32, rates in ((False, (1e9, 1e9)), ("convolutions", (1e10, 1e9)), (True, (1e10, 1e10))):
        expected = sum(count / rate for count, rate in zip(flops, rates, strict=True))
        assert seconds(model, torch.rand(2, 1, 8, 8), "fp32", tf32=tf32) == pytest.approx(expected, rel=1e-9, abs=0)
