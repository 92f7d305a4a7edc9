"""In which number format a model computes."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode


class Precision:
    """fp64 and fp32 change the parameters' type; bf16 and fp16 compute under autocast with parameters in fp32."""

    def __init__(self, name: str, device: torch.device):
        self.name = name
        self.parameter_dtype = torch.float64 if name == "fp64" else torch.float32
        self._autocast_dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(name)
        self._device_type = device.type
        # Gradients of fp16 underflow unless the loss is scaled (Micikevicius et al. 2018); a disabled scaler is inert.
        self.scaler = torch.amp.GradScaler(device.type, enabled=name == "fp16")

    @contextmanager
    def autocast(self) -> Iterator[None]:
        if self._autocast_dtype is None:
            yield
            return
        with torch.autocast(self._device_type, self._autocast_dtype):
            if self._device_type == "cpu" and not torch.cpu._is_amx_tile_supported():
                with _WholeAttention():
                    yield
            else:
                yield

    def cast(self, tensor: torch.Tensor) -> torch.Tensor:
        """Floating-point data in the parameters' type; classes stay integers."""
        return tensor.to(self.parameter_dtype) if tensor.is_floating_point() else tensor


class _WholeAttention(TorchFunctionMode):
    """torch's attention in float32 under autocast, on CPUs without tiles (AMX).

    Its kernel's backward of 256 sequences of 49 takes 33 ms in bfloat16, where it is 4 in float32 and 3 for the casts.
    What calls the kernel from within torch (nn.MultiheadAttention) is left as it is.
    """

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is not F.scaled_dot_product_attention:
            return function(*args, **kwargs)
        dtype = torch.get_autocast_dtype("cpu")
        with torch.autocast("cpu", enabled=False):
            whole = {name: _in_float32(value) for name, value in kwargs.items()}
            return function(*map(_in_float32, args), **whole).to(dtype)


def _in_float32(value: Any) -> Any:
    return value.float() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
