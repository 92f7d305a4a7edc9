"""Random numbers that follow the samples: their statistics, and the functions of torch that draw them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Beta, Categorical, Normal
from torch.utils.checkpoint import checkpoint
from worlds import build_experiment

from runner.input.batch import MicroBatch
from runner.training.draws.following import Draws, Following
from runner.training.draws.generator import Rows, random_bits, sample_keys
from runner.training.draws.recording import Recording, _compare

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
    "randint": lambda x: torch.randint(10**6, (len(x),)),
    "gumbel_softmax": F.gumbel_softmax,
    "multinomial": lambda x: torch.multinomial(x[:, 0].exp(), 3),
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
        with Recording() as recording:
            function(X[:count])
        records.append(recording.draws)
    draws = Draws(follows=True)
    return draws, _compare(draws, *records)


def call(function: Callable[[Tensor], Tensor], draws: Draws, *indices: int, step: int = 0) -> Tensor:
    draws.begin(0, step, data_rank=0)
    with draws.following(MicroBatch(X, indices)):
        return function(X[list(indices)])


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
    "rrelu in": lambda x: F.rrelu(x, training=True),
    "multinomial in": lambda x: torch.multinomial(torch.ones(5), len(x), replacement=True),
    "custom generator": lambda x: torch.rand(8, generator=OWN),
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


def test_draws_that_happen_only_in_evaluation_follow_the_samples() -> None:
    built = build_experiment("model=linear", "model._target_=test_draws.NoisyInEvaluation", "data=toy")
    assert built.recipe.draws.follows and not built.warnings


def test_the_header_names_the_line_of_such_a_draw() -> None:
    (warning,) = build_experiment("model=linear", "model._target_=test_draws.Gated", "data=toy").warnings
    assert "gru in" in warning and "/test_draws.py:" in warning and "the number of ranks" in warning
    (warning,) = build_experiment("model=mlp", "model.dropout=0.1", "compile=true").warnings
    assert warning.startswith("compile=true draws")


def test_statistics() -> None:
    """The limits are 5 standard deviations."""
    keys = sample_keys(range(256), CPU)
    words = random_bits(keys, 1024)
    bits = words[..., None] >> torch.arange(64) & 1  # (samples, positions, bits)
    assert ((bits.double().mean((0, 1)) - 0.5).abs() < 5 * 0.5 / words.numel() ** 0.5).all()
    assert len(words.unique()) == words.numel()
    neighbors = {
        "positions": words[:, 1:] ^ words[:, :-1],
        "samples": words[1:] ^ words[:-1],
        "calls": words ^ random_bits(keys + 1, 1024),
    }
    for name, difference in neighbors.items():
        ones = (difference[..., None] >> torch.arange(64) & 1).double().mean((0, 1))
        assert ((ones - 0.5).abs() < 5 * 0.5 / difference.numel() ** 0.5).all(), name
    counts = torch.bincount(words.view(torch.uint8).flatten().int(), minlength=256).double()
    expected = words.numel() * 8 / 256
    assert abs(((counts - expected) ** 2 / expected).sum().item() - 255) < 5 * (2 * 255) ** 0.5


@pytest.mark.parametrize(("function", "sharded"), [(F.scaled_dot_product_attention, 1), (F.dropout, 3)])
def test_sharded_features_of_samples_of_any_length(function: Callable[..., Tensor], sharded: int) -> None:
    """The heads of attention are split, or else the last dim, also for lengths that the dry run has not seen."""
    draws = Draws(follows=True, sample_dims={(function.__name__, 4): 0}, shard=(1, 2))
    rows = Following(draws, range(2)).rows(function, (2, 4, 5, 5), {})
    assert rows is not None and rows.sharded == (sharded, 1, 2)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_distributions(dtype: torch.dtype) -> None:
    rows = Rows(sample_keys(range(1000), CPU), torch.Size([1000, 501]), 0)
    count = 1000 * 501
    drawn, normal = rows.uniform(dtype), rows.normal(dtype).double()
    assert drawn.dtype == dtype and drawn.min() >= 0 and drawn.max() < 1
    for values, moments in ((drawn.double(), (1 / 2, 1 / 3, 1 / 4, 1 / 5)), (normal, (0.0, 1.0, 0.0, 3.0))):
        for power, expected in enumerate(moments, 1):
            error = (values**power).mean().item() - expected
            assert abs(error) < 5 * (values**power).std().item() / count**0.5
    for p in (0.0, 0.1, 0.999, 1.0):
        assert abs(rows.bernoulli(p).double().mean().item() - p) <= 5 * (p * (1 - p) / count) ** 0.5
