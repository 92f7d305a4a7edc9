"""A variational autoencoder: samples, model and objectives."""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from runner import Objective


@dataclass
class Glyph:
    image: Tensor  # (8, 8)
    noise: Tensor  # (2,), the noise of its code: part of the sample, and so equal on any number of ranks


class Glyphs:
    """Bright rectangles on black."""

    def __init__(self, train: bool, num_train: int = 41, num_val: int = 11):
        draw = torch.Generator().manual_seed(int(train))
        corners = torch.rand(num_train if train else num_val, 2, 2, generator=draw) * 8  # (N, axis, first and last)
        first, last = corners.sort(-1).values[..., None].unbind(2)
        inside = (torch.arange(8) >= first.floor()) & (torch.arange(8) <= last)  # (N, 2, 8)
        self.images = (inside[:, 0, :, None] & inside[:, 1, None]).float()
        self.noise = torch.randn(len(self.images), 2, generator=draw)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Glyph:
        return Glyph(self.images[index], self.noise[index])


class Autoencoder(nn.Module):
    def __init__(self, width: int = 16):
        super().__init__()
        self.encoder = nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.Tanh(), nn.Linear(width, 4))
        self.decoder = nn.Sequential(nn.Linear(2, width), nn.Tanh(), nn.Linear(width, 64), nn.Unflatten(1, (8, 8)))

    def forward(self, image: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(N, 8, 8), (N, 2) -> (N, 8, 8), and the code's mean and log variance, (N, 2) each"""
        mean, log_variance = self.encoder(image).chunk(2, dim=1)
        return self.decoder(mean + noise * (log_variance / 2).exp()), mean, log_variance


def divergence(mean: Tensor, log_variance: Tensor) -> Tensor:
    """Return the KL divergence from a standard normal, (N, 2), (N, 2) -> (); Kingma, Welling, 2013, appendix B."""
    return -0.5 * (1 + log_variance - mean**2 - log_variance.exp()).sum()


class Bernoulli(Objective):
    """The evidence lower bound, of pixels that are on or off."""

    def __init__(self, beta: float = 1.0):
        self.beta = beta

    def loss(self, model: Any, batch: Glyph) -> tuple[Tensor, int]:
        logits, mean, log_variance = model(batch.image, batch.noise)
        error = nn.functional.binary_cross_entropy_with_logits(logits, batch.image, reduction="sum")
        return error + self.beta * divergence(mean, log_variance), len(logits)

    def predict(self, model: Any, batch: Glyph) -> tuple[Tensor, Tensor]:
        return model(batch.image, torch.zeros_like(batch.noise))[0].sigmoid(), batch.image


class Gaussian(Objective, nn.Module):
    """The evidence lower bound, of pixels whose variance is learned; per pixel, and without a metric."""

    def __init__(self) -> None:
        super().__init__()
        self.log_variance = nn.Parameter(torch.zeros(()))

    def loss(self, model: Any, batch: Glyph) -> tuple[Tensor, Tensor]:
        image, mean, log_variance = model(batch.image, batch.noise)
        squared = (image - batch.image) ** 2 / self.log_variance.exp()
        error = 0.5 * (squared + self.log_variance + math.log(2 * math.pi)).sum()
        return error + divergence(mean, log_variance), torch.tensor(image.numel())


class InTurns(Bernoulli):
    """The two terms of the bound as two losses, both of which train the encoder."""

    losses: ClassVar = {"error": "", "closeness": "^encoder"}

    def error(self, model: Any, batch: Glyph) -> tuple[Tensor, int]:
        logits, *_ = model(batch.image, batch.noise)
        return nn.functional.binary_cross_entropy_with_logits(logits, batch.image, reduction="sum"), len(logits)

    def closeness(self, model: Any, batch: Glyph) -> tuple[Tensor, int]:
        mean, log_variance = model.encoder(batch.image).chunk(2, dim=1)
        return self.beta * divergence(mean, log_variance), len(mean)
