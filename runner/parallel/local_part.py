"""This rank's part of a tensor that is cut over ranks (a DTensor), and the way back."""

import torch
from torch.distributed.tensor import DTensor


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Itself where it is whole."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def like(tensor: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """The local tensor as this rank's part of one that is cut as the other is; itself where that is whole."""
    if not isinstance(tensor, DTensor):
        return local
    return DTensor.from_local(
        local,
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )
