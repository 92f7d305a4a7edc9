"""The network of PyTorch's first MNIST example: two convolutions, dropout, two linear layers, log-probabilities."""

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from .checks import Plan, check_dropout, check_images


class Net(nn.Module):
    """10 and 20 channels of 5 x 5 convolutions, 50 hidden units, (N, C, H, W) -> (N, num_outputs) log-probabilities.

    Raises ValueError if the samples are not images of at least 16 x 16 pixels (1 x 1 after two convolutions
    without padding and two poolings), if `dropout` is not in [0, 1), or if a size is below 1. Source:
    https://github.com/pytorch/examples/blob/0.4/mnist/main.py
    """

    def __init__(self, sample_shape: Sequence[int], num_outputs: int, dropout: float = 0.5) -> None:
        super().__init__()
        check_images("net", sample_shape, num_outputs, least=16)
        check_dropout(dropout)
        num_channels, height, width = sample_shape
        height, width = (((size - 4) // 2 - 4) // 2 for size in (height, width))
        self.conv1 = nn.Conv2d(num_channels, 10, kernel_size=5)
        self.conv2 = nn.Conv2d(10, 20, kernel_size=5)
        self.conv2_drop = nn.Dropout2d(dropout)
        self.fc1 = nn.Linear(20 * height * width, 50)
        self.fc1_drop = nn.Dropout(dropout)
        self.fc2 = nn.Linear(50, num_outputs)

    def forward(self, images: Tensor) -> Tensor:
        features = F.relu(F.max_pool2d(self.conv1(images), 2))  # (N, C, H, W) -> (N, 10, (H - 4) // 2, …)
        features = F.relu(
            F.max_pool2d(self.conv2_drop(self.conv2(features)), 2)
        )  # -> (N, 20, ((H - 4) // 2 - 4) // 2, …)
        features = self.fc1_drop(F.relu(self.fc1(features.flatten(1))))  # -> (N, 50)
        return F.log_softmax(self.fc2(features), dim=1)  # -> (N, num_outputs)

    def stages(self) -> list[nn.Module]:
        return [
            nn.Sequential(self.conv1, nn.MaxPool2d(2), nn.ReLU()),
            nn.Sequential(self.conv2, self.conv2_drop, nn.MaxPool2d(2), nn.ReLU()),
            nn.Sequential(nn.Flatten(), self.fc1, nn.ReLU(), self.fc1_drop),
            nn.Sequential(self.fc2, nn.LogSoftmax(dim=1)),
        ]

    def tensor_plan(self) -> Plan:
        return {"fc1": "colwise", "fc2": "rowwise"}
