"""Labels that do not exclude each other: a model of one logit for each."""

from torch import Tensor, nn


class Topics(nn.Module):
    def __init__(self, sample_shape: list[int], num_outputs: int, width: int = 8):
        super().__init__()
        self.hidden, self.head = nn.Linear(sample_shape[0], width), nn.Linear(width, num_outputs)

    def forward(self, features: Tensor) -> Tensor:  # (N, F) -> (N, num_outputs)
        return self.head(self.hidden(features).tanh())
