"""Custom models with properties that the shipped models lack; chosen by `model=linear model._target_=...`."""

from collections.abc import Sequence
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor, nn


class Block(nn.Module):
    """A perceptron with one hidden layer, added to its input."""

    def __init__(self, width: int, dropout: float = 0.0, batch_norm: bool = False):
        super().__init__()
        self.norm = nn.BatchNorm1d(width) if batch_norm else nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.gelu = nn.GELU()
        self.dropout = nn.Dropout(dropout)
        self.down = nn.Linear(2 * width, width)

    def forward(self, features: Tensor) -> Tensor:
        return features + self.down(self.dropout(self.gelu(self.up(self.norm(features)))))


class Chain(nn.Module):
    """A linear layer, four blocks, a linear layer. (N, *sample_shape) -> (N, num_outputs)"""

    def __init__(self, sample_shape: Sequence[int], num_outputs: int, dropout: float = 0.0, batch_norm: bool = False):
        super().__init__()
        self.embed = nn.Linear(prod(sample_shape), 8)
        self.blocks = nn.ModuleList(Block(8, dropout, batch_norm) for _ in range(4))
        self.head = nn.Linear(8, num_outputs)

    def forward(self, inputs: Tensor) -> Tensor:
        features = self.embed(inputs.flatten(1))
        for block in self.blocks:
            features = block(features)
        return self.head(features)

    def stages(self) -> list[nn.Module]:
        return [nn.Sequential(nn.Flatten(), self.embed), *self.blocks, self.head]

    def tensor_plan(self) -> dict[str, str]:
        names = [f"blocks.{index}.{name}" for index in range(4) for name in ("up", "down")]
        return {name: "colwise" if name.endswith("up") else "rowwise" for name in names}


class Tied(Chain):
    """The first and the last layer are tied, and so are the biases of two blocks."""

    def __init__(self, sample_shape: Sequence[int], num_outputs: int):
        super().__init__(sample_shape, num_outputs)
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.last.weight = self.first.weight
        self.blocks[2].norm.bias = self.blocks[0].norm.bias

    def forward(self, inputs: Tensor) -> Tensor:
        features = self.first(self.embed(inputs.flatten(1)))
        for block in self.blocks:
            features = block(features)
        return self.head(self.last(features))

    def stages(self) -> list[nn.Module]:
        return [
            nn.Sequential(nn.Flatten(), self.embed, self.first),
            *self.blocks,
            nn.Sequential(self.last, self.head),
        ]


class CutApart(Chain):
    """A tensor plan whose colwise layer is followed by no rowwise layer before the end of its block."""

    def tensor_plan(self) -> dict[str, str]:
        return {"blocks.0.up": "colwise", "head": "rowwise"}


class Frozen(Chain):
    """A layer, a block, a norm and a single weight are frozen."""

    def __init__(self, sample_shape: Sequence[int], num_outputs: int):
        super().__init__(sample_shape, num_outputs)
        for part in (self.embed, self.blocks[1], self.blocks[2].norm):
            part.requires_grad_(False)
        self.blocks[3].up.weight.requires_grad_(False)


class Backbone(Chain):
    """All layers except the last one are frozen; their BatchNorm statistics change."""

    def __init__(self, sample_shape: Sequence[int], num_outputs: int):
        super().__init__(sample_shape, num_outputs, batch_norm=True)
        for part in (self.embed, self.blocks):
            part.requires_grad_(False)


class Idle(Chain):
    """Two blocks have trainable parameters that forward does not use."""

    def __init__(self, sample_shape: Sequence[int], num_outputs: int):
        super().__init__(sample_shape, num_outputs)
        self.blocks[0].unused, self.blocks[3].unused = nn.Linear(8, 3), nn.Linear(8, 3)


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(0.5))
        self.register_buffer("offset", torch.tensor(0.25))

    def forward(self, features: Tensor) -> Tensor:
        return features * self.weight + self.offset


class Scaled(Chain):
    """The model has scalar parameters and buffers."""

    def __init__(self, sample_shape: Sequence[int], num_outputs: int):
        super().__init__(sample_shape, num_outputs)
        self.scale, self.blocks[0].norm = Scale(), nn.Sequential(nn.LayerNorm(8), Scale())

    def forward(self, inputs: Tensor) -> Tensor:
        return self.scale(super().forward(inputs))

    def stages(self) -> list[nn.Module]:
        return [*super().stages(), self.scale]


class Loaded(Chain):
    """Some weights are loaded from a file."""

    def __init__(self, sample_shape: Sequence[int], num_outputs: int, file: str = ""):
        super().__init__(sample_shape, num_outputs)
        self.blocks.load_state_dict(torch.load(file, weights_only=True))


class Hungry(Chain):
    """Runs out of memory in training on more than `holds` samples on one rank, or raises another RuntimeError."""

    def __init__(
        self,
        sample_shape: Sequence[int],
        num_outputs: int,
        holds: int = 12,
        rank: int = 0,
        lacks: str = "gpu",
        batch_norm: bool = False,
    ):
        super().__init__(sample_shape, num_outputs, batch_norm=batch_norm)
        self.holds, self.rank = holds, rank
        self.error: RuntimeError = {
            "gpu": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 bytes."),
            "cpu": RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory"),
            "luck": RuntimeError("no luck"),
        }[lacks]

    def forward(self, inputs: Tensor) -> Tensor:
        rank = dist.get_rank() if dist.is_initialized() else 0
        if self.training and rank == self.rank and len(inputs) > self.holds:
            raise type(self.error)(*self.error.args)  # a new exception keeps no frames of an earlier attempt alive
        return super().forward(inputs)


class Rotary(nn.Module):
    """Rotates pairs of features by a complex buffer, as Llama's rotary embeddings do, and scales by a parameter."""

    def __init__(self, sample_shape: list[int], num_outputs: int):
        super().__init__()
        self.first, self.head = nn.Linear(sample_shape[0], 8), nn.Linear(8, num_outputs)
        self.register_buffer("freqs_cis", torch.polar(torch.ones(4), torch.arange(4.0)))
        self.scale = nn.Parameter(torch.polar(torch.ones(4), torch.full((4,), 0.5)))

    def forward(self, inputs: Tensor) -> Tensor:
        pairs = torch.view_as_complex(self.first(inputs).unflatten(1, (4, 2)))
        return self.head(torch.view_as_real(pairs * self.freqs_cis * self.scale).flatten(1))
