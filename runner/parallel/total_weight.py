"""The weight of a whole step where it is not the number of samples: known when all ranks have had their forward."""

from collections.abc import Callable, Iterable

import torch
from torch import nn

from runner.training.saved_state import local_part


def factor_of(num_samples: int, weight: torch.Tensor, sum_over: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """By what a gradient of sum / num_samples becomes one of sum / weight, (). All ranks of sum_over must call it.

    weight: of what this rank has contributed, (), float64. Where nothing counts it is 0.
    """
    whole = sum_over(weight.clone())
    return torch.where(whole > 0, num_samples / whole.clamp(min=torch.finfo(whole.dtype).tiny), 0.0)


@torch.no_grad()
def scale_gradients(parameters: Iterable[nn.Parameter], factor: torch.Tensor) -> None:
    """In place; factor: ()."""
    for parameter in parameters:
        if parameter.grad is not None:
            own = local_part(parameter.grad)
            own.mul_(factor.to(own))
