"""Whether tensors are finite: by norms, and by each element where these overflow."""

import math

import pytest
import torch

from runner.training.finite import are_finite


@pytest.mark.parametrize("hole", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64])
def test_one_element_that_is_not_finite_is_seen(dtype: torch.dtype, hole: float) -> None:
    tensors = [torch.ones(5, dtype=torch.float32), torch.ones(3, 7, dtype=dtype)]
    assert are_finite(tensors)
    tensors[1][2, 3] = hole
    assert not are_finite(tensors)


def test_norms_that_overflow_are_no_reason() -> None:
    assert are_finite([torch.full((4,), 3e38), torch.full((9,), 6e4, dtype=torch.float16)])


def test_counters_and_what_is_empty_are_finite() -> None:
    assert are_finite([torch.tensor(3), torch.ones(0), torch.ones(2, dtype=torch.bool)])
