"""Models, data, losses and objectives as users write them, with other structures than one tensor in and one out."""

from typing import ClassVar

import torch
from torch import nn

from runner import Objective


class Sentences:
    """Tokens (L), each with the next one as its target (L); targets after a sentence's end are ignored."""

    def __init__(self, train: bool, sample_shape: list[int], num_outputs: int, num_samples: int = 47):
        (length,) = sample_shape
        generator = torch.Generator().manual_seed(int(train))
        tokens = torch.randint(num_outputs, (num_samples, length + 1), generator=generator)
        lengths = torch.randint(1, length + 1, (num_samples, 1), generator=generator)
        self.inputs = tokens[:, :-1].contiguous()
        self.targets = tokens[:, 1:].masked_fill(torch.arange(length) >= lengths, -100)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.inputs[index], self.targets[index]


class Figures:
    """Samples whose inputs (points and a scale) and targets (a class and a size) are mappings."""

    def __init__(self, train: bool, num_samples: int = 47):
        generator = torch.Generator().manual_seed(int(train))
        self.points = torch.randn(num_samples, 6, generator=generator)
        self.scale = torch.rand(num_samples, generator=generator)

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        points, scale = self.points[index], self.scale[index]
        kind, size = points[:3].argmax(), points.norm() * scale
        return {"points": points, "scale": scale}, {"kind": kind, "size": size}


class Join(nn.Module):
    def forward(self, points: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return torch.cat([points, scale[:, None]], 1)


class Heads(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.kind, self.size = nn.Linear(width, 3), nn.Linear(width, 1)

    def forward(self, features: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"kind": self.kind(features), "size": self.size(features).sum(1)}


class TwoHeads(nn.Module):
    def __init__(self, width: int = 8):
        super().__init__()
        self.join, self.first, self.second = Join(), nn.Linear(7, width), nn.Linear(width, width)
        self.third, self.heads = nn.Linear(width, width), Heads(width)

    def forward(self, points: torch.Tensor, scale: torch.Tensor) -> dict[str, torch.Tensor]:
        features = self.second(self.first(self.join(points, scale)).relu()).tanh()
        return self.heads(self.third(features))

    def stages(self) -> list[nn.Module]:
        begin = Begin(self.join, self.first, nn.ReLU())
        return [begin, nn.Sequential(self.second, nn.Tanh()), self.third, self.heads]

    def tensor_plan(self) -> dict[str, str]:
        return {"first": "colwise", "second": "rowwise"}


class Begin(nn.Sequential):
    """The first stage, which has the model's arguments."""

    def forward(self, **inputs: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        join, *others = self
        features = join(**inputs)
        for module in others:
            features = module(features)
        return features


class BothHeads(nn.Module):
    """A mean over samples, with a parameter that weights the heads (Kendall, Gal, Cipolla 2018)."""

    def __init__(self) -> None:
        super().__init__()
        self.log_variance = nn.Parameter(torch.tensor([0.5, -0.5]))

    def forward(self, outputs: dict[str, torch.Tensor], targets: dict[str, torch.Tensor]) -> torch.Tensor:
        kind = nn.functional.cross_entropy(outputs["kind"], targets["kind"])
        size = nn.functional.mse_loss(outputs["size"], targets["size"])
        return (torch.stack([kind, size]) * (-self.log_variance).exp() + self.log_variance).sum()


class LargeOnes(nn.Module):
    """A loss of both heads with a custom weight: only samples with a large target count."""

    def weight_of(self, targets: dict[str, torch.Tensor]) -> torch.Tensor:
        return (targets["size"] > 1).sum()

    def forward(self, outputs: dict[str, torch.Tensor], targets: dict[str, torch.Tensor]) -> torch.Tensor:
        large = targets["size"] > 1
        kind = nn.functional.cross_entropy(outputs["kind"], targets["kind"], reduction="none")
        return (kind + (outputs["size"] - targets["size"]) ** 2)[large].mean()


class Codes(nn.Module):
    def __init__(self, width: int = 4):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, width))
        self.decoder = nn.Sequential(nn.Linear(width, 8), nn.Tanh(), nn.Linear(8, 6))
        self.critic = nn.Sequential(nn.Linear(width, 8), nn.Tanh(), nn.Linear(8, 1))


class Reconstruction(Objective):
    """An autoencoder that calls the submodules of its model; samples are weighted by their scale."""

    def loss(self, model: Codes, batch: tuple[dict, dict]) -> tuple[torch.Tensor, torch.Tensor]:
        points, weight = batch[0]["points"], batch[0]["scale"]
        error = (model.decoder(model.encoder(points)) - points).square().mean(1)
        codes = model.critic(model.encoder(points)).square().mean(1)
        return ((error + 0.1 * codes) * weight).sum(), weight.sum()


class Adversarial(Objective):
    """Adversarial codes (Makhzani et al. 2015), with the data's scale instead of noise."""

    losses: ClassVar = {"critic": r"^critic\.", "coder": r"^(encoder|decoder)\."}

    def critic(self, model: Codes, batch: tuple[dict, dict]) -> tuple[torch.Tensor, int]:
        points, scale = batch[0]["points"], batch[0]["scale"]
        drawn = scale[:, None] * points[:, :4].cos()
        softplus = nn.functional.softplus
        codes = model.encoder(points).detach()
        return (softplus(-model.critic(drawn)) + softplus(model.critic(codes))).sum(), len(points)

    def coder(self, model: Codes, batch: tuple[dict, dict]) -> tuple[torch.Tensor, torch.Tensor]:
        points, weight = batch[0]["points"], batch[0]["scale"]
        codes = model.encoder(points)
        error = (model.decoder(codes) - points).square().mean(1)
        fooled = nn.functional.softplus(-model.critic(codes)).squeeze(1)
        return ((error + 0.5 * fooled) * weight).sum(), weight.sum()
