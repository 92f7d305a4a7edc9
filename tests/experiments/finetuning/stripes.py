"""A small ResNet of torchvision, of which only the head is trained."""

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from torchvision.models.resnet import BasicBlock, ResNet


class Stripes(TensorDataset):
    """Sample i: a (3, 16, 16) image and the class of its stripes: across, down or aslant."""

    def __init__(self, train: bool, num_train: int = 7, num_val: int = 7):
        draw = torch.Generator().manual_seed(int(train))
        size = num_train if train else num_val
        classes = torch.randint(3, (size,), generator=draw)
        across, down = torch.tensor([[0.0, 1.0], [1.0, 0.0], [0.7, 0.7]])[classes].T[:, :, None, None]
        waves = (
            torch.arange(16)[:, None] * down + torch.arange(16) * across + 6 * torch.rand(size, 1, 1, generator=draw)
        ).sin()
        super().__init__(waves[:, None] + 0.2 * torch.randn(size, 3, 16, 16, generator=draw), classes)


class Finetuned(nn.Module):
    """The backbone keeps its weights, and its BatchNorm's statistics."""

    def __init__(self, num_outputs: int):
        super().__init__()
        self.resnet = ResNet(BasicBlock, [1, 1, 1, 1])  # pretrained weights would be loaded here
        self.resnet.requires_grad_(False)
        self.resnet.fc = nn.Linear(512, num_outputs)

    def train(self, mode: bool = True) -> "Finetuned":
        super().train(False)
        return self

    def forward(self, images: Tensor) -> Tensor:  # (N, 3, H, W) -> (N, num_outputs)
        return self.resnet(images)
