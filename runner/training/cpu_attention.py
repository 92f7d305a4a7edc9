"""torch's attention under autocast on CPUs without tiles (AMX), whose kernel is slow there."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode


class CpuAttention(TorchFunctionMode):
    """Within, short sequences take two matrix products in bfloat16 where the CPU has those; the kernel is in float32.

    Its backward of 256 sequences of 49 takes 31 ms in bfloat16, 6 in float32 with the casts, and by products it is 3.
    What calls the kernel from within torch (nn.MultiheadAttention) is left as it is.
    """

    def __init__(self) -> None:
        super().__init__()
        self._has_products = torch.cpu._is_avx512_bf16_supported()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is not F.scaled_dot_product_attention or not _is_cast((*args, *kwargs.values())):
            return function(*args, **kwargs)
        dtype = torch.get_autocast_dtype("cpu")
        with torch.autocast("cpu", enabled=False):
            if self._has_products and dtype == torch.bfloat16:
                output = _by_products(*args, **kwargs)
                if output is not None:
                    return output
            whole = {name: _in_float32(value) for name, value in kwargs.items()}
            return function(*map(_in_float32, args), **whole).to(dtype)


def _is_cast(arguments: tuple[Any, ...]) -> bool:
    """Whether autocast, where it is on at this place, would cast these: it leaves float64."""
    tensors = [value for value in arguments if isinstance(value, Tensor)]
    return torch.is_autocast_enabled("cpu") and not any(tensor.dtype == torch.float64 for tensor in tensors)


def _by_products(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor | None:
    """In bfloat16, of (..., L, E) queries, (..., S, E) keys and (..., S, V) values -> (..., L, V).

    None where more is asked for, and where scores and weights would take more memory than the kernel's operands.
    """
    if attn_mask is not None or dropout_p or enable_gqa or key.size(-2) > 4 * key.size(-1):
        return None
    query, key, value = (tensor.to(torch.bfloat16) for tensor in (query, key, value))
    scores = torch.matmul(query * (query.size(-1) ** -0.5 if scale is None else scale), key.transpose(-1, -2))
    if is_causal:
        scores = scores + scores.new_full(scores.shape[-2:], -torch.inf).triu(1)
    return torch.matmul(scores.softmax(-1), value)


def _in_float32(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.is_floating_point() else value
