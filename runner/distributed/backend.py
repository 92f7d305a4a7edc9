"""The communication backend: its library, the kind of device, and the rendezvous of the ranks."""

from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class Backend:
    """The options of the group `backend`. `init` is env (the launcher's variables), file:///PATH or tcp://HOST:PORT."""

    name: str = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    init: str = "env"
    timeout_s: float = 300.0
    devices_per_rank: int = 1
    interface: str | None = None

    def device_type(self) -> str:
        """Return cpu or cuda."""
        import torch

        if self.device != "auto":
            return self.device
        return "cuda" if torch.cuda.is_available() else "cpu"

    def process_group_backend(self) -> str:
        """Return the `backend` argument of init_process_group. On GPUs, gloo exchanges CPU tensors such as flags."""
        device = self.device_type()
        if device == "cpu":
            return "gloo" if self.name == "auto" else self.name
        name = "nccl" if self.name == "auto" else self.name
        return f"cpu:gloo,{device}:{name}"

    def check(self) -> list[str]:
        """Return a message for each option that this machine does not support."""
        import torch
        import torch.distributed as dist

        from runner.distributed.network import check_interface

        messages = []
        if self.name != "auto" and not dist.is_backend_available(self.name):
            messages.append(f"backend={self.name}: this torch was built without it; try backend=auto")
        if self.device == "cuda" and not torch.cuda.is_available():
            key = "backend=nccl" if self.name == "nccl" else "backend.device=cuda"
            messages.append(f"{key} needs a GPU, and torch finds none here; try backend=gloo or backend=auto")
        elif self.name == "nccl" and self.device_type() == "cpu":
            messages.append("backend=nccl runs on GPUs only, and the device is cpu; try backend=gloo")
        if not self.init.startswith(("file:///", "tcp://")) and self.init != "env":
            messages.append(f"backend.init={self.init} must be env, file:///PATH or tcp://HOST:PORT")
        if self.devices_per_rank < 1:
            messages.append(f"backend.devices_per_rank={self.devices_per_rank} must be at least 1")
        if self.timeout_s <= 0:
            messages.append(f"backend.timeout_s={self.timeout_s} must be above 0 seconds; try 300")
        return messages + check_interface(self.interface)


def as_backend(node: dict[str, Any]) -> Backend:
    """Return the Backend of the configuration's `backend` node."""
    return Backend(**{key: value for key, value in node.items() if not key.startswith("_")})
