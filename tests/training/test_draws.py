"""Random numbers that follow the samples: their statistics, and the functions of torch that draw them."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Beta, Categorical, Normal, VonMises
from torch.utils.checkpoint import checkpoint
from worlds import build_experiment

from runner.input.batch import MicroBatch
from runner.training.draws.distributions import FILLS, multinomial
from runner.training.draws.following import Draws, Following
from runner.training.draws.generator import Rows, sample_keys
from runner.training.draws.observed_draws import ObservedDraws, _compare

CPU = torch.device("cpu")
X = torch.randn(6, 4, 8, generator=torch.Generator().manual_seed(0))
attention = nn.MultiheadAttention(8, 2, dropout=0.5)
FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda x: F.dropout(F.dropout(x, 0.5), 0.5, inplace=True),
    "dropout1d": nn.Dropout1d(),
    "dropout2d": lambda x: F.dropout2d(x[..., None]),
    "alpha_dropout": nn.AlphaDropout(),
    "feature_alpha_dropout": nn.FeatureAlphaDropout(),
    "rand": lambda x: torch.rand((len(x), 3), dtype=torch.float64),
    "randn of blocks": lambda x: torch.randn(2 * len(x), 3).view(len(x), 6),
    "rand_like": torch.rand_like,
    "uniform_": lambda x: torch.empty_like(x).uniform_(-1, 1),
    "normal_": lambda x: x.new_empty(x.shape).normal_(std=2.0),
    "bernoulli_": lambda x: x.new_empty(len(x), 1, 1).bernoulli_(0.5) * x,
    "bernoulli": lambda x: torch.bernoulli(x.sigmoid()),
    "randint": lambda x: torch.randint(10**6, (len(x),)) + torch.randint_like(x, 5, 10**6)[:, 0, 0],
    "random_": lambda x: x.new_empty(x.shape).random_() + x.new_empty(x.shape).random_(9),
    "exponential_": lambda x: x.new_empty(x.shape).exponential_(2.0),
    "cauchy_": lambda x: x.new_empty(x.shape).cauchy_().clamp(-9, 9),
    "log_normal_": lambda x: x.new_empty(x.shape).log_normal_(),
    "geometric_": lambda x: x.new_empty(x.shape).geometric_(0.01),
    "bernoulli_ of probabilities": lambda x: x.new_empty(x.shape).bernoulli_(x.sigmoid()),
    "poisson": lambda x: torch.poisson(10 * x.exp()),
    "rrelu": lambda x: F.rrelu(F.rrelu(x, training=True) - 0.5, training=True, inplace=True),
    "gumbel_softmax": F.gumbel_softmax,
    "multinomial": lambda x: torch.multinomial(x[:, 0].exp(), 3),
    "multinomial of common weights": lambda x: torch.multinomial(torch.ones(99), len(x), replacement=True),
    "normal": lambda x: Normal(x, 1.0).rsample(),
    "normal with a common mean": lambda x: torch.normal(torch.zeros(1, 4, 8), x.exp()),
    "categorical": lambda x: Categorical(logits=x).sample(),
    "beta": lambda x: Beta(x.exp(), 1.0).rsample(),
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x, torch.ones(4, 4).tril().bool(), 0.5),
    "MultiheadAttention": lambda x: attention(*[x.transpose(0, 1)] * 3)[0].transpose(0, 1),
    "common to all samples": lambda x: x * torch.rand(8) + torch.randperm(8) + torch.rand(()),
}


def record(function: Callable[[Tensor], Tensor]) -> tuple[Draws, str]:
    """Return what a function of samples draws, and why that cannot follow them."""
    records = []
    for count in (2, 3):
        torch.manual_seed(0)
        with ObservedDraws() as observed:
            function(X[:count])
        records.append(observed.draws)
    draws = Draws(follows=True)
    return draws, _compare(draws, *records)


def call(
    function: Callable[[Tensor], Tensor], draws: Draws, *indices: int, step: int = 0, samples: Tensor = X
) -> Tensor:
    draws.begin(0, step, data_rank=0)
    with draws.following(MicroBatch(samples, indices)):
        return function(samples[list(indices)])


@pytest.mark.parametrize("name", FUNCTIONS)
def test_numbers_depend_on_the_sample_and_the_step(name: str) -> None:
    function = FUNCTIONS[name]
    draws, problem = record(function)
    assert not problem
    whole = call(function, draws, *range(6))
    parts = [call(function, draws, 2, 0, 1), call(function, draws, 3), call(function, draws, 5, 4)]
    order = torch.tensor([2, 0, 1, 3, 5, 4])
    assert torch.allclose(torch.cat(parts), whole[order], rtol=0, atol=1e-6)
    assert not torch.equal(call(function, draws, *range(6), step=1), whole)
    assert not torch.equal(call(function, draws, *[0] * 6)[1], call(function, draws, *[1] * 6)[1])


def attend(x: Tensor) -> Tensor:
    """Attention of two heads that ignores padding, with dropout of weights, (N, L, C) -> (N, L, C)."""
    query, mask = x.unflatten(2, (2, 4)).transpose(1, 2), (x != 0).any(2)[:, None, None]
    return F.scaled_dot_product_attention(query, query, query, mask, 0.5).transpose(1, 2).flatten(2)


def attend_flattened(x: Tensor) -> Tensor:
    """The same with a matrix for each head of each sample, (N * heads, L, L), and without softmax."""
    query = x.repeat_interleave(2, dim=0)
    return (F.dropout(query @ query.mT) @ query).unflatten(0, (-1, 2)).sum(1)


VMAPPED: dict[str, Callable[[Tensor], Tensor]] = {
    "noise": lambda x: x + torch.randn_like(x),
    "rand": lambda x: torch.rand(3) + x.sum(),
    "dropout": F.dropout,
    "dropout in place": lambda x: F.dropout(x + 1, inplace=True),
    "dropout1d": lambda x: F.dropout1d(x[None])[0],
    "fill": lambda x: torch.empty_like(x).exponential_(),
    "multinomial": lambda x: torch.multinomial(x.exp(), 3),
    "gradient": torch.func.grad(lambda x: (F.dropout(x) ** 2).sum()),
    "nested": torch.vmap(F.dropout, randomness="different"),
}


@pytest.mark.parametrize("name", VMAPPED)
def test_iterations_of_vmap_follow_the_samples(name: str) -> None:
    function = torch.vmap(VMAPPED[name], randomness="different")
    draws, problem = record(function)
    assert not problem
    whole = call(function, draws, *range(6))
    parts = [call(function, draws, 2, 0, 1), call(function, draws, 3), call(function, draws, 5, 4)]
    assert torch.allclose(torch.cat(parts), whole[[2, 0, 1, 3, 5, 4]], rtol=0, atol=1e-6)
    assert not torch.equal(*call(function, draws, 0, 1, samples=X[:1].expand(2, -1, -1)))


PADDED: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": F.dropout,
    "dropout of channels first": lambda x: F.dropout(x.mT).mT,
    "dropout, steps first": lambda x: F.dropout(x.transpose(0, 1)).transpose(0, 1),
    "dropout, samples last": lambda x: F.dropout(x.transpose(0, 2)).transpose(0, 2),
    "dropout of all steps": lambda x: F.dropout(x.flatten(0, 1)).view_as(x),
    "dropout of steps": lambda x: F.dropout2d(x[..., None])[..., 0],
    "alpha_dropout": lambda x: F.alpha_dropout(x.mT, training=True).mT,
    "attention": attend,
    "attention of flattened heads": attend_flattened,
    "rand": lambda x: torch.rand(len(x), 3, x.size(1)).mT,
    "randn": lambda x: torch.randn(len(x), 3, x.size(1), dtype=torch.float64).mT,
    "randint": lambda x: torch.randint(10**6, (len(x), 3, x.size(1))).mT,
    "gumbel_softmax": lambda x: F.gumbel_softmax(x.mT, dim=1).mT,
    "bernoulli": lambda x: torch.bernoulli(x.mT.sigmoid()).mT,
    "normal": lambda x: torch.normal(x.mT, x.mT.exp()).mT,
    "categorical": lambda x: Categorical(logits=x).sample(torch.Size([3])).permute(1, 2, 0),
    "multinomial": lambda x: torch.multinomial(x.exp().flatten(0, 1), 3).view(len(x), -1, 3),
    "rrelu": lambda x: F.rrelu(x.mT, training=True).mT,
    **{name: lambda x, name=name: getattr(x.mT.contiguous(), name)().mT for name in FILLS if name != "geometric_"},
}


@pytest.mark.parametrize("name", PADDED)
def test_padding_changes_no_number(name: str) -> None:
    """Sequences of 4 steps are padded to 7 steps; the dry run has seen 4."""
    draws, problem = record(PADDED[name])
    assert not problem
    padded = call(PADDED[name], draws, *range(6), samples=F.pad(X, (0, 0, 0, 3)))
    assert torch.allclose(padded[:, :4], call(PADDED[name], draws, *range(6)), rtol=0, atol=1e-6)


def test_a_draw_in_the_order_of_a_padded_sample_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    draws, _ = record(lambda x: torch.poisson(x.exp()))
    call(lambda x: torch.poisson(x.exp()), draws, *range(6))
    assert not caplog.text
    call(lambda x: torch.poisson(x.exp()), draws, *range(6), samples=F.pad(X, (0, 0, 0, 3)))
    assert "poisson draws [1, 7, 8] numbers of a sample, unlike in the dry run" in caplog.text


def test_attention_without_dropped_weights_equals_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Rows, "bernoulli", lambda rows, p: torch.ones(rows.shape))
    query, key, value = X[:, None].expand(-1, 4, -1, -1), X[:, None].expand(-1, 2, -1, -1), X.new_ones(6, 2, 4, 3)
    options: dict[str, Any] = {"attn_mask": torch.ones(4, 4).tril().bool(), "scale": 0.3, "enable_gqa": True}

    def attend(p: float) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, dropout_p=p, **options)

    draws = Draws(follows=True, sample_dims={("scaled_dot_product_attention", 4): 0})
    assert torch.allclose(call(lambda x: attend(0.5), draws, *range(6)), 2 * attend(0.0))


def test_a_stage_draws_other_numbers_when_it_is_called_again() -> None:
    model = nn.Sequential(nn.Identity(), nn.Dropout())

    def twice(x: Tensor) -> Tensor:
        return torch.stack([model(torch.ones_like(x)), model(torch.ones_like(x))])

    draws, _ = record(model)
    assert draws.seed_stages(model, [*model])
    first, second = call(twice, draws, *range(6))
    assert not torch.equal(first, second)


class DroppedInputs(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(F.dropout(x))  # type: ignore[no-any-return]


def test_a_draw_before_the_first_module_of_a_stage_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Identity(), nn.Dropout())
    stage = DroppedInputs(model[1])
    draws, _ = record(stage)
    assert draws.seed_stages(model, [model[0], stage])
    for compute, count in ((model[1], 0), (stage, 1)):
        draws.begin(0, 0, data_rank=0)
        with draws.following(MicroBatch(X, range(6)), stage=1):
            compute(X)
        assert caplog.text.count("test_draws.py") == count
    assert "dropout draws before the first module of a pipeline's stage" in caplog.text


def test_a_recomputation_draws_the_numbers_of_the_forward() -> None:
    """The gradient of dropout's sum is its output for ones."""
    model = nn.Sequential(nn.Dropout(), nn.Dropout())

    def recompute(x: Tensor) -> Tensor:
        return checkpoint(model[1], model[0](x), use_reentrant=False)  # type: ignore[no-any-return]

    def compare(x: Tensor) -> Tensor:
        x = torch.ones_like(x).requires_grad_()
        outputs = recompute(x)
        outputs.sum().backward()
        return torch.stack([outputs, x.grad])  # type: ignore[list-item]

    draws, problem = record(recompute)
    assert not problem and not draws.seed_stages(model, [*model])
    outputs, gradient = call(compare, draws, *range(6))
    assert torch.equal(outputs, gradient)


def test_a_shape_that_the_dry_run_has_not_drawn_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    draws, _ = record(lambda x: x * torch.rand(8))
    call(lambda x: x * torch.rand(8) + torch.rand(len(x))[:, None, None], draws, *range(6))
    assert "test_draws.py" in caplog.text and "rand draws a tensor of shape [6], unlike in the dry run" in caplog.text


class GRU(nn.GRU):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x)[0]


OWN = torch.Generator()
gru = GRU(8, 8, 2, dropout=0.5)
PROBLEMS: dict[str, Callable[[Tensor], Tensor]] = {
    "gru in": gru,
    "rand_like in": lambda x: torch.rand_like(torch.complex(x, x)).real,
    "multinomial in": lambda x: torch.multinomial(torch.ones(5), len(x)),
    "custom generator": lambda x: torch.rand(8, generator=OWN),
    "poisson": torch.vmap(lambda x: torch.poisson(x.exp()), randomness="different"),
    "two samples together": lambda x: x[torch.randperm(len(x))],
    "another call along dim 0": lambda x: F.dropout(x) + F.dropout(x.transpose(0, 1)).transpose(0, 1),
    "for 1 sample in another call": lambda x: torch.rand(len(x), 8) + torch.rand(1, 8).expand(len(x), -1),
    "is 3 for two samples": lambda x: sum(torch.rand(()) for _ in range(len(x) + 1)) * x,  # type: ignore[arg-type]
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_draws_that_cannot_follow_the_samples_are_named(name: str) -> None:
    assert name in record(PROBLEMS[name])[1]


class Gated(nn.Module):
    def __init__(self, sample_shape: list[int], num_outputs: int) -> None:
        super().__init__()
        self.layer, self.out = nn.GRU(1, 4, 2, dropout=0.5, batch_first=True), nn.Linear(4, num_outputs)

    def forward(self, x: Tensor) -> Tensor:
        hidden, _ = self.layer(x[..., None])
        return self.out(hidden[:, -1])


class NoisyInEvaluation(nn.Linear):
    def __init__(self, sample_shape: list[int], num_outputs: int) -> None:
        super().__init__(sample_shape[0], num_outputs)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if self.training else x + torch.randn_like(x))


class Drawing(nn.Linear):
    def __init__(self, sample_shape: list[int], num_outputs: int, way: str) -> None:
        super().__init__(sample_shape[0], num_outputs)
        self.way = way
        if way == "gradient":
            self.weight.register_hook(lambda gradient: gradient + torch.randn_like(gradient))

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = super().forward(F.dropout(x))
        if self.way == "views":
            first, second = torch.randn(2 * len(x), 1).exp().chunk(2)
            return outputs * first * second
        if self.way == "rejection":
            return outputs + VonMises(outputs.detach(), 0.1).sample()
        if self.way == "orders":
            return outputs + F.dropout(torch.cat([x, x]))[: len(x)].mean() + F.dropout(x.repeat_interleave(2, 0)).mean()
        return outputs + x.flip(0).mean(1, keepdim=True) if self.way == "mixed" else outputs


@pytest.mark.parametrize(
    ("way", "message"),
    [
        ("views", "or draws numbers that do not follow them"),
        ("mixed", "it compares samples, or"),
        ("rejection", "draws until the numbers of all samples are accepted"),
        ("orders", "with the samples in different orders"),
        ("gradient", "draws for a gradient of all samples"),
    ],
)
def test_the_header_warns_of_draws_that_depend_on_other_samples(way: str, message: str) -> None:
    model = ("model=linear", "model._target_=test_draws.Drawing", f"+model.way={way}")
    (warning,) = build_experiment(*model, "data=toy").warnings
    assert message in warning and "on the number of ranks and micro_batches" in warning


def test_draws_that_happen_only_in_evaluation_follow_the_samples() -> None:
    built = build_experiment("model=linear", "model._target_=test_draws.NoisyInEvaluation", "data=toy")
    assert built.recipe.draws.follows and not built.warnings


def test_the_header_names_the_line_of_such_a_draw() -> None:
    (warning,) = build_experiment("model=linear", "model._target_=test_draws.Gated", "data=toy").warnings
    assert "gru in" in warning and "/test_draws.py:" in warning and "the number of ranks" in warning
    for value in ("true", "max-autotune"):
        (warning,) = build_experiment("model=mlp", "model.dropout=0.1", f"compile={value}").warnings
        assert warning.startswith(f"compile={value} draws")


def test_statistics() -> None:
    """Numbers of neighbors along each dim and of transposed elements are independent, within 5 standard deviations."""
    keys = sample_keys(torch.arange(64))
    rows = Rows(keys, torch.Size([8, 64, 8, 64]), 1)
    words = rows.words(64)
    bits = words[..., None] >> torch.arange(64) & 1
    assert ((bits.double().mean((0, 1, 2, 3)) - 0.5).abs() < 5 * 0.5 / words.numel() ** 0.5).all()
    assert len(words.unique()) == words.numel()
    row, column = torch.tril_indices(8, 8, -1)
    neighbors = {str(dim): words ^ words.roll(1, dim) for dim in range(4)} | {
        "transposed": (words[row, :, column] ^ words[column, :, row])[None],
        "calls": words ^ replace(rows, keys=keys + 1).words(64),
    }
    for name, difference in neighbors.items():
        ones = (difference[..., None] >> torch.arange(64) & 1).double().mean((0, 1, 2, 3))
        assert ((ones - 0.5).abs() < 5 * 0.5 / difference.numel() ** 0.5).all(), name
    counts = torch.bincount(words.flatten().view(torch.uint8).int(), minlength=256).double()
    expected = words.numel() * 8 / 256
    assert abs(((counts - expected) ** 2 / expected).sum().item() - 255) < 5 * (2 * 255) ** 0.5


SHARDED = [  # function, shapes of a sample in the dry run, drawn shape of a sample, dim that is split on two ranks
    (F.scaled_dot_product_attention, [(1, 8, 9, 9)], (1, 4, 5, 5), 1),
    (F.dropout, [(1, 8, 9, 9)], (1, 4, 5, 5), 1),
    (F.dropout, [(8, 9, 9)], (4, 9, 9), 0),  # (N * heads, L, L)
    (F.dropout, [(1, 9, 8)], (1, 5, 4), 2),
    (F.dropout, [(1, 9, 8)], (1, 5, 8), None),
    (F.dropout, [(1, 8)], (1, 8), None),
    (F.dropout, [(1, 8), (1, 16)], (1, 8), 1),
    (torch.rand, [(1,)], (1,), None),
]


@pytest.mark.parametrize(("function", "shapes", "drawn", "split"), SHARDED)
def test_the_sharded_dim(
    function: Callable[..., Tensor], shapes: list[tuple[int, ...]], drawn: tuple[int, ...], split: int | None
) -> None:
    name = function.__name__
    draws = Draws(follows=True, sample_dims={(name, len(drawn)): 0}, shard=(1, 2))
    draws.of_samples.update({(name, shape): {"model.py:1"} for shape in shapes})
    rows = Following(draws, MicroBatch(None, [0, 1])).rows(
        function, (2 * drawn[0], *drawn[1:]), {}, None, in_order=False
    )
    assert rows is not None
    assert rows.start == (() if split is None else tuple(n if d == split else 0 for d, n in enumerate(drawn)))


@pytest.mark.parametrize("size", [32, 64])
@pytest.mark.parametrize(("dim", "width"), [(0, 1), (1, 3), (2, 1)])
def test_a_part_of_a_tensor(size: int, dim: int, width: int) -> None:
    shape = [5, 6, 7]
    shape[dim] = 4 * width
    rows = Rows(sample_keys(torch.arange(4)), torch.Size(shape), dim)
    whole = rows.words(size)
    for split in {0, 1, 2} - {dim}:
        for first, count in ((1, 2), (2, 3)):
            part = torch.Size(count if d == split else n for d, n in enumerate(shape))
            start = tuple(first if d == split else 0 for d in range(3))
            assert torch.equal(replace(rows, shape=part, start=start).words(size), whole.narrow(split, first, count))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_distributions(dtype: torch.dtype) -> None:
    rows = Rows(sample_keys(torch.arange(1000)), torch.Size([1000, 501]), 0)
    count = 1000 * 501
    drawn, normal = rows.uniform(dtype), rows.normal(dtype).double()
    assert drawn.dtype == dtype and drawn.min() >= 0 and drawn.max() < 1
    exponential = FILLS["exponential_"][1](rows, dtype, 2.0).double()
    geometric = FILLS["geometric_"][1](rows, dtype, 0.25).double()
    first = multinomial(rows, torch.ones(1000, 501), replacement=False)[:, 0].double()
    second = multinomial(rows, torch.tensor([1.0, 0.0, 3.0, 0.0]).expand(1000, -1), replacement=True).double()
    for values, moments in (
        (drawn.double(), (1 / 2, 1 / 3, 1 / 4, 1 / 5)),
        (normal, (0.0, 1.0, 0.0, 3.0)),
        (exponential, (1 / 2, 1 / 2, 3 / 4)),
        (geometric, (4.0, 28.0)),
        (rows.integers(-2, 3).double(), (0.0, 2.0)),
        (first, (250.0, 250 * 1001 / 3)),
        (second, (1.5, 3.0)),
    ):
        for power, expected in enumerate(moments, 1):
            error = (values**power).mean().item() - expected
            assert abs(error) < 5 * (values**power).std().item() / values.numel() ** 0.5
    for p in (0.0, 0.1, 0.999, 1.0):
        assert abs(rows.bernoulli(p).double().mean().item() - p) <= 5 * (p * (1 - p) / count) ** 0.5
