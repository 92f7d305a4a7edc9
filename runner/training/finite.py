"""Whether numbers are finite, by their norms: to look at each takes as long as fifteen of these."""

from collections.abc import Iterable, Sequence

import torch


def are_finite(tensors: Iterable[torch.Tensor]) -> bool:
    """Of all elements, with one wait for each device. What is not of floating point is finite."""
    held = [tensor for tensor in tensors if tensor.is_floating_point() or tensor.is_complex()]
    return all(flag.item() for flag in norms_are_finite(held)) or each_is_finite(held)


def norms_are_finite(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Of the tensors of each device and dtype, () of bool. A norm may overflow where no element has."""
    alike: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            alike.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return [torch.stack(torch._foreach_norm(group)).isfinite().all() for group in alike.values()]


def each_is_finite(tensors: Sequence[torch.Tensor]) -> bool:
    """By each element, for what norms leave open."""
    return all(bool(tensor.isfinite().all()) for tensor in tensors)
