"""Models that cannot be exported as they are, and tied ones: `model=linear model._target_=odd_model.NAME`."""

import torch
from torch import Tensor, nn


class _Linear(nn.Module):
    def __init__(self, sample_shape: list[int], num_outputs: int):
        super().__init__()
        self.first = nn.Linear(torch.Size(sample_shape).numel(), num_outputs)


class OtherWhenExported(_Linear):
    """Returns different outputs while it is being traced."""

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = self.first(inputs.flatten(1))
        return outputs + 0.5 if torch.compiler.is_exporting() else outputs


class Counting(_Linear):
    """Its control flow depends on values of tensors, which tracing does not support."""

    def forward(self, inputs: Tensor) -> Tensor:
        return self.first(inputs.flatten(1)) * len(inputs[inputs > 0].tolist())


class TiedTwice(_Linear):
    """One tensor under three names, and an empty buffer."""

    def __init__(self, sample_shape: list[int], num_outputs: int):
        super().__init__(sample_shape, num_outputs)
        self.second, self.third = nn.Linear(num_outputs, num_outputs), nn.Linear(num_outputs, num_outputs)
        self.third.weight = self.second.weight
        self.again = self.second
        self.register_buffer("nothing", torch.zeros(0, 3))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.third(self.again(self.first(inputs.flatten(1))))
