"""A class for each pixel: images with blobs whose border is ignored, and a convolutional network."""

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

BORDER = 255


class Blobs(TensorDataset):
    """Sample i: a (1, 12, 12) image and the (12, 12) class of each pixel: 0 outside, 1 inside, 255 at the border."""

    def __init__(self, train: bool, num_train: int = 41, num_val: int = 11):
        draw = torch.Generator().manual_seed(int(train))
        size = num_train if train else num_val
        centre, radius = torch.rand(size, 2, 1, 1, generator=draw) * 12, 2 + 3 * torch.rand(size, 1, 1, generator=draw)
        away = ((torch.arange(12)[:, None] - centre[:, 0]) ** 2 + (torch.arange(12) - centre[:, 1]) ** 2).sqrt()
        classes = (away < radius).long().masked_fill((away - radius).abs() < 0.7, BORDER)  # (N, 12, 12)
        noise = torch.randn(size, 1, 12, 12, generator=draw)
        super().__init__((away < radius)[:, None] + 0.3 * noise, classes)


class Net(nn.Module):
    """One downsampling and upsampling, whose result is concatenated with the fine features."""

    def __init__(self, num_outputs: int, channels: int = 4):
        super().__init__()
        self.fine = nn.Sequential(nn.Conv2d(1, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU())
        self.coarse = nn.Sequential(
            nn.Conv2d(channels, 2 * channels, 3, stride=2, padding=1), nn.BatchNorm2d(2 * channels), nn.ReLU()
        )
        self.up = nn.ConvTranspose2d(2 * channels, channels, 2, stride=2)
        self.head = nn.Conv2d(2 * channels, num_outputs, 1)

    def forward(self, images: Tensor) -> Tensor:  # (N, 1, H, W) -> (N, num_outputs, H, W)
        fine = self.fine(images)
        return self.head(torch.cat([fine, self.up(self.coarse(fine))], dim=1))
