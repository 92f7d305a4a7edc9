"""Whether tensors are finite: by their norms, and by each element if norms overflow."""

import math

import pytest
import torch

from runner.training.callbacks.finite_weights import are_finite


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64])
def test_a_single_non_finite_element_is_detected(dtype: torch.dtype, value: float) -> None:
    tensors = [torch.ones(5, dtype=torch.float32), torch.ones(3, 7, dtype=dtype)]
    assert are_finite(tensors)
    tensors[1][2, 3] = value
    assert not are_finite(tensors)


@pytest.mark.parametrize(
    "tensors",
    [
        [torch.full((4,), 3e38), torch.full((9,), 6e4, dtype=torch.float16)],  # norms that overflow
        [torch.tensor(3), torch.ones(0), torch.ones(2, dtype=torch.bool)],
    ],
)
def test_large_empty_and_integer_tensors_are_finite(tensors: list[torch.Tensor]) -> None:
    assert are_finite(tensors)
