"""In which number format a model computes."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from runner.training.cpu_attention import CpuAttention


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
                with CpuAttention():
                    yield
            else:
                yield

    def cast(self, tensor: torch.Tensor) -> torch.Tensor:
        """Floating-point data in the parameters' type; classes stay integers."""
        return tensor.to(self.parameter_dtype) if tensor.is_floating_point() else tensor
