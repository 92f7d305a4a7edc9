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
from runner.tensor_values import has_values


class Precision:
    """fp64 and fp32 set the parameters' dtype; the others compute under autocast, with parameters in fp32."""

    def __init__(self, name: str, device: torch.device):
        self.name = name
        self.parameter_dtype = torch.float64 if name == "fp64" else torch.float32
        self._autocast_dtype = {"bf16": torch.bfloat16, "float8": torch.bfloat16, "fp16": torch.float16}.get(name)
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
    return has_values(tensor) and not torch.allclose(converted.to(tensor.dtype), tensor, rtol=0, atol=0, equal_nan=True)


class CpuAttention(TorchFunctionMode):
    """Computes attention under autocast in float32, because torch's kernel is slow on CPUs without tiles (AMX).

    The backward of 256 sequences of length 49 takes 31 ms with the bfloat16 kernel, and 6 ms in float32 including the
    casts. Calls from within torch (nn.MultiheadAttention) are unchanged.
    """

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is not F.scaled_dot_product_attention or not _is_cast((*args, *kwargs.values())):
            return function(*args, **kwargs)
        dtype = torch.get_autocast_dtype("cpu")
        with torch.autocast("cpu", enabled=False):
            float32_kwargs = {name: _in_float32(value) for name, value in kwargs.items()}
            return function(*map(_in_float32, args), **float32_kwargs).to(dtype)


def _is_cast(arguments: tuple[Any, ...]) -> bool:
    """Return True if autocast is enabled here and would cast these arguments; it does not cast float64."""
    tensors = [value for value in arguments if isinstance(value, Tensor)]
    return torch.is_autocast_enabled("cpu") and not any(tensor.dtype == torch.float64 for tensor in tensors)


def _in_float32(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.is_floating_point() else value
