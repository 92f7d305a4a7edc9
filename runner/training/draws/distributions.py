"""Random numbers of torch's distributions, computed from the bits of a counter-based generator."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from runner.training.draws.generator import Rows


def bernoulli(rows: Rows, dtype: torch.dtype, p: Any) -> Tensor:
    return rows.uniform(p.dtype) < p.detach() if isinstance(p, Tensor) else rows.bernoulli(p)


def multinomial(rows: Rows, weights: Tensor, replacement: bool) -> Tensor:
    """Return indices of the last dim of the weights. `rows` draws one number for each index, or else for each weight.

    Without replacement, the indices are those of the largest weights divided by exponential numbers, as in torch. They
    are in descending order, and include all weights.
    """
    if not replacement:
        return (weights / -rows.positive(weights.dtype).log()).argsort(-1, descending=True)
    sums = weights.double().cumsum(-1)
    targets = rows.uniform(torch.float64) * sums[..., -1:]
    return torch.searchsorted(sums, targets, right=True).clamp_(max=weights.size(-1) - 1)


def _geometric(rows: Rows, dtype: torch.dtype, p: float) -> Tensor:
    return (rows.positive(dtype).log() / math.log1p(-p)).ceil().clamp_(min=1) if p < 1 else rows.positive(dtype).ceil()


def _random(rows: Rows, dtype: torch.dtype, low: int, high: int | None) -> Tensor:
    if high is None:  # the largest integer of the dtype, or the largest that floating-point numbers count to
        exact = int(2 / torch.finfo(dtype).eps) if dtype.is_floating_point else None
        high = 2 if dtype == torch.bool else (exact or torch.iinfo(dtype).max) + 1
    return rows.integers(low, high)


# The parameters of the methods that fill a tensor, with torch's defaults, and the numbers for a dtype and parameters.
FILLS: dict[str, tuple[dict[str, Any], Callable[..., Tensor]]] = {
    "uniform_": ({"from": 0.0, "to": 1.0}, lambda rows, dtype, low, high: rows.uniform(dtype) * (high - low) + low),
    "normal_": ({"mean": 0.0, "std": 1.0}, lambda rows, dtype, mean, std: rows.normal(dtype) * std + mean),
    "log_normal_": (
        {"mean": 1.0, "std": 2.0},
        lambda rows, dtype, mean, std: (rows.normal(dtype) * std + mean).exp_(),
    ),
    "cauchy_": (
        {"median": 0.0, "sigma": 1.0},
        lambda rows, dtype, median, sigma: (torch.pi * (rows.positive(dtype) - 0.5)).tan_() * sigma + median,
    ),
    "exponential_": ({"lambd": 1.0}, lambda rows, dtype, rate: -rows.positive(dtype).log() / rate),
    "geometric_": ({"p": 0.5}, _geometric),
    "bernoulli_": ({"p": 0.5}, bernoulli),
    "random_": ({"from": 0, "to": None}, _random),
}
