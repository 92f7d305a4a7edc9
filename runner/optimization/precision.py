"""The number format of a model's computation, and attention under autocast on CPUs."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from runner.input.batch import cast_floating


class Precision:
    """fp64 and fp32 set the parameters' dtype; bf16 and fp16 compute under autocast with parameters in fp32."""

    def __init__(self, name: str, device: torch.device):
        self.name = name
        self.parameter_dtype = torch.float64 if name == "fp64" else torch.float32
        self._autocast_dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(name)
        self._device_type = device.type
        # fp16 gradients underflow unless the loss is scaled (Micikevicius et al. 2018); a disabled scaler does nothing.
        self.scaler = torch.amp.GradScaler(device.type, enabled=name == "fp16")

    @contextmanager
    def autocast(self) -> Iterator[None]:
        with ExitStack() as stack:
            if self._autocast_dtype is not None:
                stack.enter_context(torch.autocast(self._device_type, self._autocast_dtype))
                if self._device_type == "cpu" and not torch.cpu._is_amx_tile_supported():
                    stack.enter_context(CpuAttention())
            yield


def convert(module: nn.Module, dtype: torch.dtype) -> list[str]:
    """Convert a module's parameters and buffers, in place. Complex tensors stay complex, unlike with nn.Module.to.

    Return the names of those that do not keep their values or had 8 bits; values on the meta device are unknown.
    """
    named = chain(module.named_parameters(), module.named_buffers())
    changed = [name for name, tensor in named if _changes(tensor, cast_floating(tensor, dtype))]
    module._apply(lambda tensor: cast_floating(tensor, dtype))
    return changed


def _changes(tensor: Tensor, converted: Tensor) -> bool:
    if converted.element_size() >= tensor.element_size():
        return tensor.dtype.is_floating_point and tensor.element_size() == 1
    return not (tensor.is_meta or torch.allclose(converted.to(tensor.dtype), tensor, rtol=0, atol=0, equal_nan=True))


class CpuAttention(TorchFunctionMode):
    """Replaces torch's attention kernel under autocast on CPUs without tiles (AMX), where the kernel is slow.

    Short sequences use two matrix products in bfloat16 if the CPU supports them; otherwise the kernel runs in float32.
    The backward of 256 sequences of length 49 takes 31 ms with the bfloat16 kernel, 6 ms in float32 including the
    casts, and 3 ms with matrix products. Calls from within torch (nn.MultiheadAttention) are unchanged.
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
            float32_kwargs = {name: _in_float32(value) for name, value in kwargs.items()}
            return function(*map(_in_float32, args), **float32_kwargs).to(dtype)


def _is_cast(arguments: tuple[Any, ...]) -> bool:
    """Return True if autocast is enabled here and would cast these arguments; it does not cast float64."""
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
    """Return attention in bfloat16: (..., L, E) queries, (..., S, E) keys and (..., S, V) values -> (..., L, V).

    Returns None for other options, and if scores and weights would take more memory than the kernel's operands.
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
