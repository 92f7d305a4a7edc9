"""Samples, losses and objectives, each wrong in one way."""

from typing import Any, ClassVar, NamedTuple

import torch
from torch import nn
from torch.utils.data import TensorDataset

from runner import Objective


class Points(TensorDataset):
    """Sample i: (4,) numbers and a class of 3."""

    def __init__(self, train: bool, num_samples: int = 24, dtype: str = "int64"):
        super().__init__(
            torch.randn(num_samples, 4, generator=torch.Generator().manual_seed(int(train))),
            (torch.arange(num_samples) % 3).to(getattr(torch, dtype)),
        )


class Threes(Points):
    def __getitem__(self, index):
        return *super().__getitem__(index), 1.0


class Mappings(Points):
    def __getitem__(self, index):
        point, kind = super().__getitem__(index)
        return {"point": point, "kind": kind}


class Raising(Points):
    def __getitem__(self, index):
        raise KeyError(f"no sample {index}")


class RaisingLater(Points):
    def __getitem__(self, index):
        if index == 20:
            raise KeyError(f"no sample {index}")
        return super().__getitem__(index)


class Dropping(Points):
    """Its collate drops the last sample of batches of at least `least` samples."""

    def __init__(self, train: bool, least: int = 2):
        super().__init__(train)
        self.least = least

    def collate(self, samples):
        kept = samples[:-1] if len(samples) >= self.least else samples
        points, kinds = zip(*kept, strict=True)
        return torch.stack(points), torch.stack(kinds)


class UncutAhead(Points):
    """Sets reads_ahead, although its batches contain the number of rows, which has no row per sample."""

    reads_ahead = True

    def __getitems__(self, indices):
        points, kinds = self[indices]
        return points, kinds, torch.tensor(len(indices))


class Ragged(Points):
    """Sample i: (T, 4) and the class of each step, T from 1 to 3."""

    def __getitem__(self, index):
        point, kind = super().__getitem__(index)
        return point.expand(index % 3 + 1, 4), kind.expand(index % 3 + 1)

    def collate(self, samples):
        points, kinds = zip(*samples, strict=True)
        pad = nn.utils.rnn.pad_sequence
        return pad(points, batch_first=True), pad(kinds, batch_first=True, padding_value=-100)


class Square(Points):
    """Sample i: (4,) and a class for each of three positions."""

    def __getitem__(self, index):
        point, kind = super().__getitem__(index)
        return point, kind.expand(3)


class Outputs(NamedTuple):
    classes: Any
    auxiliary: Any


class Net(nn.Module):
    """Two layers; `kind` selects what forward returns."""

    def __init__(self, kind: str = "tensor"):
        super().__init__()
        self.first, self.second, self.kind = nn.Linear(4, 5), nn.Linear(5, 3), kind

    def forward(self, inputs):
        outputs = self.second(self.first(inputs).tanh())
        if self.kind == "square":
            return outputs[:, :, None].expand(-1, -1, 3)
        if self.kind == "auxiliary" and self.training:
            return Outputs(outputs, outputs)
        if self.kind == "failing" and self.training:
            raise KeyError("in training")
        if self.kind == "one":
            return outputs[:, :1]
        return {"classes": outputs} if self.kind == "mapping" else outputs

    def stages(self):
        return [nn.Sequential(self.first, nn.Tanh()), self.second]

    def tensor_plan(self):
        return {"first": "colwise", "second": "rowwise"}


class OfMapping(nn.Module):
    def forward(self, outputs, targets):
        return nn.functional.cross_entropy(outputs["classes"], targets)


class Vector(nn.Module):
    def forward(self, outputs, targets):
        return nn.functional.cross_entropy(outputs, targets, reduction="none")


class Floating(nn.Module):
    def forward(self, outputs, targets):
        return nn.functional.cross_entropy(outputs, targets).item()


class Fine(Objective):
    def loss(self, model, batch):
        return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="sum"), len(batch[1])


class OneNumber(Fine):
    def loss(self, model, batch):
        return super().loss(model, batch)[0]


class NoWeight(Fine):
    def loss(self, model, batch):
        return super().loss(model, batch)[0], None


class Failing(Fine):
    def loss(self, model, batch):
        return model(batch["points"])


class Patterns(Fine):
    """Two losses of these patterns."""

    def __init__(self, first: str = "^first", second: str = "^second"):
        self.losses = {"loss": first, "other": second}

    def other(self, model, batch):
        return self.loss(model, batch)


class OnePattern(Fine):
    def __init__(self, pattern: str):
        self.losses = {"loss": pattern}


class Missing(Fine):
    losses: ClassVar = {"loss": "^first", "discriminator": "^second"}


class Listed(Fine):
    losses: ClassVar = ["loss"]


class NoLosses(Fine):
    losses: ClassVar = {}


class NotOne:
    def loss(self, model, batch):
        return 0


class Bytes(TensorDataset):
    """Has the option of data=arrays that converts integers."""

    divisor = None

    def __init__(self, train: bool, sample_shape: list[int]):
        super().__init__(torch.ones(24, *sample_shape, dtype=torch.int64), torch.arange(24) % 3)
