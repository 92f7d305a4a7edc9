"""Custom models that draw random numbers of many shapes and orders, and padded data for them."""

from collections.abc import Sequence
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence


class Ragged:
    """Sentences of 3 to 9 tokens, padded to the longest of a batch; each token's target is the next one."""

    def __init__(self, train: bool, num_samples: int = 47, num_outputs: int = 7):
        generator = torch.Generator().manual_seed(int(train))
        lengths = torch.randint(3, 10, (num_samples,), generator=generator)
        self.tokens = [torch.randint(1, num_outputs, (int(length) + 1,), generator=generator) for length in lengths]

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.tokens[index][:-1], self.tokens[index][1:]

    def collate(self, samples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        tokens, targets = zip(*samples, strict=True)
        return pad_sequence(tokens, batch_first=True), pad_sequence(targets, batch_first=True, padding_value=-100)


class Reader(nn.Module):
    """Attention with dropout of its weights in three layouts, and draws whose padded dim is not the first one."""

    def __init__(self, width: int = 8, num_outputs: int = 7):
        super().__init__()
        self.embed, self.head = nn.Embedding(num_outputs, width), nn.Linear(width, num_outputs)
        self.layer = nn.TransformerEncoderLayer(width, 2, 16, dropout=0.1, batch_first=True)
        self.attention = nn.MultiheadAttention(width, 2, dropout=0.1, batch_first=True)
        self.mix = nn.Conv1d(width, width, 1)

    def forward(self, tokens: Tensor) -> Tensor:
        padding = tokens == 0
        features = self.layer(self.embed(tokens), src_key_padding_mask=padding)
        features = features + self.attention(features, features, features, key_padding_mask=padding)[0]
        if self.training:
            channels = F.dropout(self.mix(features.mT), 0.2)  # (N, C, L)
            channels = F.dropout1d(channels, 0.1) + 0.1 * torch.randn_like(channels)
            channels = channels * torch.empty_like(channels).exponential_() + torch.bernoulli(channels.sigmoid())
            features = channels.mT + F.gumbel_softmax(channels, dim=1).mT
            features = F.dropout2d(features[..., None], 0.1)[..., 0]  # whole steps
        return self.head(features)


class Between(nn.Module):
    """Dropout and noise before, between and after sharded layers, of sharded and of replicated activations."""

    def __init__(self, sample_shape: Sequence[int], num_outputs: int, steps: int = 0):
        super().__init__()
        self.steps = steps  # 0 for activations of two dims
        self.embed, self.head = nn.Linear(prod(sample_shape), 8 * max(1, steps)), nn.Linear(8, num_outputs)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def tensor_plan(self) -> dict[str, str]:
        return {"up": "colwise", "down": "rowwise"}

    def forward(self, inputs: Tensor) -> Tensor:
        features = self.embed(inputs.flatten(1)).tanh()
        if self.steps:
            features = features.unflatten(1, (self.steps, 8))
        features = F.dropout(features, 0.2, self.training)
        hidden = self.up(features)
        residual = F.dropout(features, 0.3, self.training) + 0.1 * torch.randn_like(features)
        hidden = F.dropout(hidden.relu(), 0.3, self.training)
        hidden = hidden + 0.1 * torch.randn_like(hidden)
        features = F.dropout(residual + self.down(hidden), 0.2, self.training)
        return self.head(features.mean(1) if self.steps else features)


class Orders(nn.Module):
    """Samples in other orders than one after the other, in torch.vmap, and in the hook of a gradient."""

    def __init__(self, sample_shape: Sequence[int], num_outputs: int):
        super().__init__()
        self.embed, self.head = nn.Linear(prod(sample_shape), 8), nn.Linear(16, num_outputs)

    def forward(self, inputs: Tensor) -> Tensor:
        features = self.embed(inputs.flatten(1)).tanh()
        if self.training:
            noisy = torch.vmap(lambda row: F.dropout(row + 0.1 * torch.randn_like(row), 0.2), randomness="different")
            features = noisy(features)
            features = F.alpha_dropout(features.t().reshape(-1, 1), 0.2, training=True).view(8, -1).t()
            slope = torch.func.grad(lambda row: (F.dropout(row, 0.2) ** 2).sum())
            features = features + torch.vmap(slope, randomness="different")(features.detach())
        if features.requires_grad:
            features.register_hook(lambda gradient: gradient * (1 + 0.1 * torch.rand_like(gradient)))
        views = F.dropout(torch.cat([features, features]), 0.3, self.training)
        return self.head(torch.cat(views.chunk(2), 1))
