"""A small convolutional network with batch normalization, for images."""

from collections.abc import Sequence

from torch import Tensor, nn

from .checks import Plan, check_images


class ConvNet(nn.Module):
    """Two conv-BatchNorm-ReLU-pool blocks and a linear head, (N, C, H, W) -> (N, num_outputs).

    Raises ValueError if the samples are not images of at least 4 x 4 pixels (1 x 1 after two poolings), if `channels`
    is not two sizes, or if a size is below 1.
    """

    def __init__(self, sample_shape: Sequence[int], num_outputs: int, channels: Sequence[int] = (16, 32)) -> None:
        super().__init__()
        check_images("convnet", sample_shape, num_outputs, least=4)
        if len(channels) != 2 or min(channels) < 1:
            raise ValueError(f"channels={list(channels)} must be two sizes of at least 1; try [16, 32]")
        num_channels, height, width = sample_shape
        self.block1 = _block(num_channels, channels[0])
        self.block2 = _block(channels[0], channels[1])
        self.head = nn.Linear(channels[1] * (height // 4) * (width // 4), num_outputs)

    def forward(self, images: Tensor) -> Tensor:
        features = self.block1(images)  # (N, C, H, W) -> (N, channels[0], H // 2, W // 2)
        features = self.block2(features)  # -> (N, channels[1], H // 4, W // 4)
        return self.head(features.flatten(1))  # -> (N, num_outputs)

    def stages(self) -> list[nn.Module]:
        return [self.block1, self.block2, nn.Sequential(nn.Flatten(), self.head)]

    def tensor_plan(self) -> Plan:
        return {"head": "rowwise"}  # the blocks are replicated, because torch cannot shard convolutions


def _block(num_inputs: int, num_outputs: int) -> nn.Sequential:
    # (N, num_inputs, H, W) -> (N, num_outputs, H // 2, W // 2)
    return nn.Sequential(
        nn.Conv2d(num_inputs, num_outputs, kernel_size=5, stride=1, padding=2),
        nn.BatchNorm2d(num_outputs),
        nn.ReLU(),
        nn.MaxPool2d(kernel_size=2, stride=2),
    )
