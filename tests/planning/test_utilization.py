"""The shortest time of a sample on a GPU, compared with FLOPs that are counted by hand."""

import pytest
import torch
from torch import nn

from runner.objectives.supervised import Supervised
from runner.planning.utilization import shortest_seconds

RATES = {"fp32": 1e9, "tf32": 1e10, "bf16": 1e11}


def seconds(model: nn.Module, inputs: torch.Tensor, precision: str, frozen: tuple[str, ...] = ()) -> float:
    objective = Supervised(nn.MSELoss())
    with torch.device("meta"):
        targets = model.to("meta")(inputs.to("meta"))
    state = torch.get_rng_state()

    def make() -> nn.Module:
        torch.rand(())
        return model.requires_grad_()

    found = shortest_seconds(make, [*frozen], objective, (inputs, torch.zeros(targets.shape)), RATES, precision)
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
