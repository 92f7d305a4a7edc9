"""Whether a tensor has values, or only a shape."""

import torch
from torch._subclasses.fake_tensor import FakeTensor


def has_values(tensor: torch.Tensor) -> bool:
    """Return False on the meta device, and for the fake tensors of a plan."""
    return not (tensor.is_meta or isinstance(tensor, FakeTensor))
