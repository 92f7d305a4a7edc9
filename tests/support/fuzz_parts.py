"""Data, parts of models and optimizers from which test_fuzz.py draws random experiments."""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from custom_models import Block, Scale
from runner.shipped.data.toy import ToyRegression
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from runner.objectives.objective import Objective


class Labels(ToyRegression):
    """Samples whose target is the index of the largest output of the toy regression, in an integer type."""

    def __init__(self, train: bool, dtype: str = "int64", **options: Any):
        super().__init__(train, **options)
        self.targets = self.targets.argmax(1).to(getattr(torch, dtype))


class Sequences:
    """Sequences of 1 to 6 vectors, padded with zeros. `sample_shape` is that of the first one, (3, num_features)."""

    data: type[ToyRegression] = ToyRegression

    def __init__(self, train: bool, **options: Any):
        self._data = self.data(train, **options)

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        points, target = self._data[index]
        return torch.cat([points, points.roll(1, dims=1)])[: 1 + (index * 5 + 2) % 6], target

    def collate(self, samples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        sequences, targets = zip(*samples, strict=True)
        return pad_sequence(sequences, batch_first=True), torch.stack(targets)


class LabeledSequences(Sequences):
    """Sequences whose targets are those of Labels."""

    data = Labels


class TwoTerms(Objective):
    """A term of all samples, and one of the samples with a large first target."""

    terms: ClassVar = {"fit": 1.0, "size": 0.1}

    def loss(self, model: Any, batch: Any) -> Any:
        outputs, large = model(batch[0]), batch[1][:, 0] > -1
        fit = (outputs - batch[1]).square().mean(1)
        return {"fit": (fit.sum(), len(fit)), "size": (outputs[large].square().sum(), large.sum())}


class Buckets(nn.Embedding):
    """Adds the mean embedding of the rounded features."""

    def forward(self, features: Tensor) -> Tensor:
        return features + super().forward((2 * features + 6).long().clamp(0, 11)).mean(1)


class Rotary(nn.Module):
    """Rotates pairs of features by a complex buffer, and scales them by a complex parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("angles", torch.polar(torch.ones(4), torch.arange(4.0)), persistent=False)
        self.scale = nn.Parameter(torch.polar(torch.ones(4), torch.full((4,), 0.5)))

    def forward(self, features: Tensor) -> Tensor:
        pairs = torch.view_as_complex(features.unflatten(1, (4, 2)))
        return torch.view_as_real(pairs * self.angles * self.scale).flatten(1)


class Noise(nn.Module):
    """Adds noise of each sample, in evaluation too, and a number that all samples share."""

    def forward(self, features: Tensor) -> Tensor:
        return features + 0.1 * torch.randn_like(features) + torch.rand(()).to(features)


class Idle(Block):
    """A block with a parameter that forward does not use."""

    def __init__(self) -> None:
        super().__init__(8)
        self.unused = nn.Parameter(torch.ones(3))


class Plain(nn.Module):
    """Scales the features by a tensor that is neither a parameter nor a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.linspace(0.5, 1.5, 8)

    def forward(self, features: Tensor) -> Tensor:
        return features * self.scale


class Unpacked(nn.Module):
    """Calls the layers of its child, and never the child."""

    def __init__(self) -> None:
        super().__init__()
        self.child = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 8))

    def forward(self, features: Tensor) -> Tensor:
        return self.child[1](self.child[0](features).tanh())


class Direct(nn.Module):
    """Uses the parameters of its child, and never calls the child."""

    def __init__(self) -> None:
        super().__init__()
        self.child = nn.Linear(8, 8)

    def forward(self, features: Tensor) -> Tensor:
        return F.linear(features, self.child.weight, self.child.bias)


class NormAct(nn.BatchNorm1d):
    """BatchNorm and an activation in one forward, as in timm's BatchNormAct2d."""

    def forward(self, features: Tensor) -> Tensor:
        self.num_batches_tracked.add_(self.training)
        normalized = F.batch_norm(
            *(features, self.running_mean, self.running_var, self.weight, self.bias),
            *(self.training, 0.1, self.eps),
        )
        return F.gelu(normalized)


class Annealed(nn.Module):
    """Divides the features by a temperature that each forward in training lowers."""

    def __init__(self, kind: str = ""):
        super().__init__()
        self.kind, self.temperature, self.calls = kind, 2.0, []
        if kind == "buffer":
            self.register_buffer("lowered", torch.ones(()))
        if kind == "frozen":
            self.lowered = nn.Parameter(torch.ones(()), requires_grad=False)
        if kind == "tensor":
            self.lowered = torch.ones(())

    def forward(self, features: Tensor) -> Tensor:
        if self.training:
            self.temperature *= 0.9 if self.kind in ("number", "extra_tensor", "extra_dict") else 1
            self.calls += [1] if self.kind == "list" else []
            if self.kind in ("buffer", "frozen"):
                self.lowered.data.mul_(0.9)
            if self.kind == "tensor":
                self.lowered = self.lowered * 0.9
        lowered = self.lowered if self.kind in ("buffer", "frozen", "tensor") else 1
        return features / (self.temperature * lowered * 0.9 ** len(self.calls))


class ExtraTensor(Annealed):
    """Annealed, whose temperature torch saves as a tensor."""

    def __init__(self) -> None:
        super().__init__("extra_tensor")

    def get_extra_state(self) -> Tensor:
        return torch.tensor(self.temperature, dtype=torch.float64)

    def set_extra_state(self, state: Tensor) -> None:
        self.temperature = float(state)


class ExtraDict(Annealed):
    """Annealed, whose temperature torch saves in a dict."""

    def __init__(self) -> None:
        super().__init__("extra_dict")

    def get_extra_state(self) -> dict[str, float]:
        return {"temperature": self.temperature}

    def set_extra_state(self, state: dict[str, float]) -> None:
        self.temperature = state["temperature"]


class Between(Block):
    """Drops features of the residual branch, between the calls of the two layers that tp shards.

    `draws`: "dropout" of the features (N, 8), "noise" on them, or "tokens" for dropout of (N, 2, 4).
    """

    def __init__(self, draws: str):
        super().__init__(8)
        self.draws = draws

    def forward(self, features: Tensor) -> Tensor:
        hidden = self.up(features)
        if self.draws == "noise":
            features = features + 0.1 * torch.randn_like(features)
        elif self.draws == "dropout":
            features = F.dropout(features, 0.3, self.training)
        else:
            features = F.dropout(features.unflatten(1, (2, 4)), 0.3, self.training).flatten(1)
        return self.norm(features + self.down(hidden.tanh()))


class Heads(nn.Module):
    """Attention of two tokens with dropout of its weights, in four heads that tp shards. (N, 8) -> (N, 8)"""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(*sizes) for sizes in [(4, 8)] * 3 + [(8, 4)])

    def forward(self, features: Tensor) -> Tensor:
        tokens = features.unflatten(1, (2, 4))
        heads = [layer(tokens).unflatten(2, (-1, 2)).transpose(1, 2) for layer in (self.query, self.key, self.value)]
        mixed = F.scaled_dot_product_attention(*heads, dropout_p=0.2 if self.training else 0.0)
        return features + self.out(mixed.transpose(1, 2).flatten(2)).flatten(1)


class Views(nn.Module):
    """Drops features of two views of each sample, in one batch."""

    def forward(self, features: Tensor) -> Tensor:
        first, second = F.dropout(torch.cat([features, features]), 0.3, self.training).chunk(2)
        return first + second.tanh()


class Transposed(nn.Module):
    """Drops features of a tensor in which no dim is that of the samples."""

    def forward(self, features: Tensor) -> Tensor:
        dropped = F.dropout(features.t().reshape(-1, 1), 0.3, self.training)
        return dropped.reshape(features.shape[::-1]).t().contiguous()


class VonMises(nn.Module):
    """Adds angles that torch.distributions draws by rejection."""

    def forward(self, features: Tensor) -> Tensor:
        angles = torch.distributions.VonMises(features.detach(), torch.ones_like(features)).sample()
        return features + 0.1 * angles.to(features)


class Vectorized(nn.Module):
    """Adds noise that torch.vmap draws for each sample."""

    def forward(self, features: Tensor) -> Tensor:
        return torch.vmap(lambda row: row + 0.1 * torch.randn_like(row), randomness="different")(features)


class NoisyGradient(nn.Module):
    """Adds noise to the gradient of the features."""

    def forward(self, features: Tensor) -> Tensor:
        if features.requires_grad:
            features.register_hook(lambda gradient: gradient * (1 + 0.1 * torch.randn_like(gradient)))
        return features * 1.0


class Encoder(nn.TransformerEncoderLayer):
    """torch's encoder layer. (N, T, 8), (N, T) -> (N, T, 8)"""

    def __init__(self) -> None:
        super().__init__(8, 2, 8, dropout=0.2, batch_first=True)

    def forward(self, features: Tensor, given: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(features, src_key_padding_mask=~given)


class PaddedDraw(nn.Module):
    """Draws random numbers of a tensor whose padded dim is not the first after the samples."""

    def __init__(self, kind: str):
        super().__init__()
        self.kind = kind

    def forward(self, features: Tensor, given: Tensor) -> Tensor:
        if self.kind == "channels":  # (N, C, T), as of Conv1d
            return F.dropout(features.mT, 0.3, self.training).mT
        if self.kind == "frames":  # (T, N, C), in evaluation too
            return features + 0.1 * torch.randn_like(features.transpose(0, 1)).transpose(0, 1)
        if self.kind == "steps":  # (N, C, T), in evaluation too
            return features + torch.empty_like(features.mT).uniform_(-0.1, 0.1).mT
        mask, drop = given[:, None, None], 0.2 if self.training else 0.0
        if self.kind == "pairs":  # (N * heads, T, T)
            heads = features.unflatten(2, (2, 4)).transpose(1, 2)
            weights = (heads @ heads.mT).masked_fill(~mask, -torch.inf).softmax(3).flatten(0, 1)
            return (F.dropout(weights, drop).unflatten(0, (-1, 2)) @ heads).transpose(1, 2).flatten(2)
        heads = features.unflatten(2, (2, 4)).transpose(1, 2)  # (N, heads, T, 4)
        return F.scaled_dot_product_attention(heads, heads, heads, mask, drop).transpose(1, 2).flatten(2)


READERS: dict[str, Callable[[], nn.Module]] = {
    "encoder": Encoder,
    **{kind: lambda kind=kind: PaddedDraw(kind) for kind in ("channels", "frames", "steps", "pairs", "attention")},
}


class Reader(nn.Module):
    """Embeds the vectors of padded sequences, mixes or changes them, and adds them up. (N, T, F) -> (N, 8)"""

    def __init__(self, num_features: int, kind: str):
        super().__init__()
        self.embed, self.layer = nn.Linear(num_features, 8), READERS[kind]()

    def forward(self, inputs: Tensor) -> Tensor:
        given = (inputs != 0).any(2)
        features = self.layer(self.embed(inputs), given)
        return features.masked_fill(~given[..., None], 0).sum(1)


def _tokens(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Unflatten(1, (2, 4)), *layers, nn.Flatten())


PARTS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Sequential(nn.Linear(8, 3), nn.Tanh(), nn.Linear(3, 8, bias=False)),
    "tied": lambda: nn.Linear(8, 8),  # all of them have the same weight
    "shared": lambda: nn.Linear(8, 8),  # all of them are the same module
    "frozen": lambda: nn.Linear(8, 8).requires_grad_(False),
    "conv": lambda: _tokens(nn.Conv1d(2, 2, 3, padding=1), nn.Tanh(), nn.BatchNorm1d(2)),
    "attention": lambda: _tokens(nn.TransformerEncoderLayer(4, 2, 8, dropout=0.2, batch_first=True)),
    "batch_norm": lambda: nn.BatchNorm1d(8, momentum=None, affine=False),
    "layer_norm": lambda: nn.LayerNorm(8),
    "group_norm": lambda: nn.GroupNorm(2, 8),
    "weight_norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)),
    "buckets": lambda: Buckets(12, 8),
    "scale": Scale,
    "rotary": Rotary,
    "idle": Idle,
    "dropout": lambda: nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3)),
    "noise": lambda: nn.Sequential(nn.Linear(8, 8), Noise()),
    "block": lambda: Block(8, dropout=0.2),
    "norm_block": lambda: Block(8, batch_norm=True),
    "plain": Plain,
    "orthogonal": lambda: nn.Sequential(nn.utils.parametrizations.orthogonal(nn.Linear(8, 4)), nn.Linear(4, 8)),
    "unpacked": Unpacked,
    "direct": Direct,
    "inplace": lambda: nn.Sequential(nn.LeakyReLU(inplace=True), nn.Linear(8, 8)),
    "inplace_dropout": lambda: nn.Sequential(nn.Dropout(0.2, inplace=True), nn.Linear(8, 8)),
    "norm_act": lambda: NormAct(8),
    "state_extra_tensor": ExtraTensor,
    "state_extra_dict": ExtraDict,
    **{f"state_{kind}": lambda kind=kind: Annealed(kind) for kind in ("number", "buffer", "frozen", "tensor", "list")},
    **{f"between_{kind}": lambda kind=kind: Between(kind) for kind in ("dropout", "noise", "tokens")},
    "heads": Heads,
    "views": Views,
    "transposed": Transposed,
    "von_mises": VonMises,
    "vectorized": Vectorized,
    "noisy_gradient": NoisyGradient,
    "rrelu": lambda: nn.Sequential(nn.Linear(8, 8), nn.RReLU()),
}
PLANS = {
    Block: {"up": "colwise", "down": "rowwise"},
    Heads: {"query": "colwise", "key": "colwise", "value": "colwise", "out": "rowwise"},
}


class Unstaged(nn.Module):
    """A linear layer or a Reader, some of PARTS, and a linear layer, without stages(). (N, ...) -> (N, num_outputs)"""

    def __init__(self, sample_shape: Sequence[int], num_outputs: int, parts: Sequence[str], reader: str = ""):
        super().__init__()
        self.first = Reader(sample_shape[-1], reader) if reader else nn.Linear(sample_shape[-1], 8)
        self.head = nn.Linear(8, num_outputs)
        shared, tied = nn.Linear(8, 8), nn.Linear(8, 8).weight
        self.parts = nn.ModuleList(shared if part == "shared" else PARTS[part]() for part in parts)
        for name, part in zip(parts, self.parts, strict=True):
            if name == "tied":
                part.weight = tied

    def forward(self, inputs: Tensor) -> Tensor:
        features = self.first(inputs)
        for part in self.parts:
            features = part(features)
        return self.head(features)

    def tensor_plan(self) -> dict[str, str]:
        plans = [
            (f"parts.{i}", next((PLANS[kind] for kind in PLANS if isinstance(part, kind)), {}))
            for i, part in enumerate(self.parts)
        ]
        return {f"{prefix}.{name}": way for prefix, plan in plans for name, way in plan.items()}


class Net(Unstaged):
    """The same model with stages."""

    def stages(self) -> list[nn.Module]:
        return [self.first, *self.parts, self.head]


class Outer(nn.Module):
    """Calls the parts of a model, and uses the parameters of its last layer. (N, ...) -> (N, num_outputs)"""

    def __init__(self, **options: Any):
        super().__init__()
        self.net = Unstaged(**options)

    def forward(self, inputs: Tensor) -> Tensor:
        features = self.net.first(inputs)
        for part in self.net.parts:
            features = part(features)
        return F.linear(features, self.net.head.weight, self.net.head.bias)

    def tensor_plan(self) -> dict[str, str]:
        return {f"net.{name}": way for name, way in self.net.tensor_plan().items()}


class Normalized(torch.optim.SGD):
    """Divides the step by a statistic over all parameters, as Prodigy and D-Adaptation do."""

    def __init__(self, params: Any, lr: float = 0.05):
        super().__init__(params, lr=lr)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        given = [(group, each) for group in self.param_groups for each in group["params"] if each.grad is not None]
        total = sum(parameter.grad.abs().square().sum() for _, parameter in given) ** 0.5
        for group, parameter in given:
            parameter.sub_(parameter.grad * (group["lr"] / (total + 0.1)))


class Lars(torch.optim.SGD):
    """Divides the step of each parameter by the norm of its gradient (You, Gitman, Ginsburg, 2017)."""

    def __init__(self, params: Any, lr: float = 0.05):
        super().__init__(params, lr=lr)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad * (group["lr"] / (parameter.grad.norm() + 0.1)))
