"""A generative adversarial network: two models in one, two losses, an optimizer for each."""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from runner import Objective


class Rings:
    """Sample i: {image: (1, 8, 8), a ring on black; noise: (4,), of which an image is generated}."""

    def __init__(self, train: bool, num_train: int = 41, num_val: int = 11):
        draw = torch.Generator().manual_seed(int(train))
        size = num_train if train else num_val
        centre, radius = 3 + 2 * torch.rand(size, 2, 1, 1, generator=draw), 2 + torch.rand(size, 1, 1, generator=draw)
        away = ((torch.arange(8)[:, None] - centre[:, 0]) ** 2 + (torch.arange(8) - centre[:, 1]) ** 2).sqrt()
        self.images = (1 - (away - radius).abs()).clamp(min=0)[:, None] * 2 - 1
        self.noise = torch.randn(size, 4, generator=draw)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"image": self.images[index], "noise": self.noise[index]}


class Adversaries(nn.Module):
    def __init__(self, channels: int = 4):
        super().__init__()
        self.generator = nn.Sequential(
            nn.Linear(4, 4 * 4 * channels),
            nn.Unflatten(1, (4 * channels, 2, 2)),
            nn.BatchNorm2d(4 * channels),
            nn.ReLU(),
            nn.ConvTranspose2d(4 * channels, channels, 4, stride=2, padding=1),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.ConvTranspose2d(channels, 1, 4, stride=2, padding=1),
            nn.Tanh(),
        )
        self.discriminator = nn.Sequential(
            nn.Conv2d(1, channels, 4, stride=2, padding=1),
            nn.LeakyReLU(0.2),
            nn.Conv2d(channels, 2 * channels, 4, stride=2, padding=1),
            nn.LeakyReLU(0.2),
            nn.Flatten(),
            nn.Linear(8 * channels, 1),
        )


class Game(Objective):
    """Goodfellow et al., "Generative Adversarial Nets", 2014, section 3; the generator's loss is the one that does not
    saturate. softplus(-x) is -log sigmoid(x)."""

    losses: ClassVar = {"discriminator": "^discriminator", "generator": "^generator"}

    def discriminator(self, model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
        with torch.no_grad():
            made = model.generator(batch["noise"])
        real, fake = model.discriminator(batch["image"]), model.discriminator(made)
        return (softplus(-real) + softplus(fake)).sum(), len(real)

    def generator(self, model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
        fake = model.discriminator(model.generator(batch["noise"]))
        return softplus(-fake).sum(), len(fake)
