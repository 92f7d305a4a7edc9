"""A model built on the meta device gets, part by part, the weights that its constructor would have drawn."""

import logging
from collections.abc import Callable

import pytest
import torch
from ranks import run_ranks
from runner.shipped.models.convnet import ConvNet
from runner.shipped.models.transformer import Transformer
from torch import nn

from runner.objectives.supervised import call_model
from runner.training.model.deferred_init import build_deferred, probe

CPU = torch.device("cpu")


class Odd(nn.Module):
    """Initializes its weights in ways other than reset_parameters in the order of modules()."""

    def __init__(self) -> None:
        super().__init__()
        self.late = nn.Linear(7, 5, dtype=torch.float64)
        self.embed = nn.Embedding(11, 7)
        self.tied = nn.Linear(7, 11)
        self.tied.weight = self.embed.weight
        self.attention = nn.MultiheadAttention(8, 2)
        generator = torch.Generator().manual_seed(3)
        self.own = nn.Parameter(torch.rand(4, generator=generator))
        self.other = nn.Parameter(torch.empty(4).uniform_(generator=generator), requires_grad=False)
        self.register_buffer("waves", torch.outer(torch.arange(4.0), 1 / torch.tensor(10.0) ** torch.arange(3)).sin())
        nn.init.orthogonal_(self.tied.weight)  # does nothing for a tensor on the meta device
        nn.init.trunc_normal_(self.embed.weight, std=0.02)  # may draw again, depending on the values
        with torch.no_grad():
            self.attention.in_proj_weight[:8].normal_()
            torch._foreach_mul_([self.own, self.other], 2.0)
            self.late.weight.div_(self.late.weight.norm())
            if self.late.weight[0, 0] > 0:  # needs the value
                self.late.bias[2:4] = self.late.bias.max().item()
        self.copied = nn.Parameter(self.late.weight.detach().clone().T)


@pytest.mark.parametrize(
    "make",
    [
        lambda: ConvNet((1, 8, 8), 10),
        lambda: Transformer((1, 8, 8), 10, dim=8, depth=2, heads=2),
        lambda: nn.LSTM(4, 5),
        Odd,
    ],
    ids=["convnet", "transformer", "lstm", "odd"],
)
def test_materialized_weights_equal_those_of_the_constructor(make: Callable[[], nn.Module]) -> None:
    # In a separate process, because a process that has computed with several threads cannot fork one that does.
    run_ranks(compare_weights, 1, make)


def compare_weights(rank: int, world_size: int, make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(3)
    expected = make()
    drawn = torch.rand(1)
    torch.manual_seed(3)
    built = build_deferred("mine", make)
    model, deferred = built.module, built.deferred
    assert deferred is not None and not built.warnings
    assert torch.equal(torch.rand(1), drawn)  # the generator is in the same state
    assert all(parameter.is_meta for parameter in model.parameters())

    for each in (expected, model):
        each.to(torch.float64).to(memory_format=torch.channels_last)
    parts = [] if isinstance(model, Odd) else list(model.children())  # its parts share a weight
    state = torch.get_rng_state()
    for part in reversed(parts):
        deferred.materialize([part], CPU)
        assert not any(parameter.is_meta for parameter in part.parameters())
    deferred.materialize([model], CPU)
    assert torch.equal(torch.get_rng_state(), state)
    for kind in (nn.Module.named_parameters, nn.Module.named_buffers):
        for (name, one), (same, other) in zip(kind(expected), kind(model), strict=True):  # type: ignore[operator]
            assert name == same
            assert torch.equal(one, other), name
            assert (one.dtype, one.stride(), one.requires_grad) == (other.dtype, other.stride(), other.requires_grad)
    if isinstance(model, Odd):
        assert model.tied.weight is model.embed.weight


def test_probe_runs_without_weights() -> None:
    run_ranks(run_probe, 1)


def run_probe(rank: int, world_size: int) -> None:
    model = nn.Sequential(ConvNet((1, 8, 8), 3), nn.LogSoftmax(dim=-1)).to("meta").eval()
    with torch.no_grad():
        outputs = probe(model, call_model, torch.rand(2, 1, 8, 8))
    assert outputs.shape == (2, 3) and outputs.isfinite().all()
    assert outputs[0].unique().numel() == 3  # layers of equal weights would make them equal
    assert all(parameter.is_meta for parameter in model.parameters())


class Shared:
    """An object with tensors that is no module."""

    def __init__(self, tensor: torch.Tensor):
        self.tensor, self.itself = tensor, self


class Plain(nn.Linear):
    """Has tensors that are neither parameters nor buffers."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.scale = torch.rand(4)
        self.halves = self.scale[:2], self.scale[2:]
        self.nested = {"shared": Shared(self.scale), "list": [torch.ones(2), "text"]}
        self.copied = self.weight.detach() * 2
        self.teacher = [nn.Linear(4, 2).requires_grad_(False)]
        self.parameter_list = [self.weight]
        with torch.no_grad():
            self.scale.mul_(2)


def test_other_tensors_are_created_at_once() -> None:
    run_ranks(compare_other_tensors, 1)


def compare_other_tensors(rank: int, world_size: int) -> None:
    torch.manual_seed(3)
    expected = Plain()
    torch.manual_seed(3)
    built = build_deferred("mine", Plain)
    model, deferred = built.module, built.deferred
    assert deferred is not None and not built.warnings
    assert model.weight.is_meta and model.parameter_list[0] is model.weight
    assert model.nested["shared"].tensor is model.scale
    for read in (
        lambda each: each.scale,
        lambda each: each.halves[1],
        lambda each: each.nested["list"][0],
        lambda each: each.copied,
        lambda each: each.teacher[0].weight,
    ):
        assert torch.equal(read(model), read(expected))
    assert isinstance(model.teacher[0].weight, nn.Parameter) and not model.teacher[0].weight.requires_grad
    model.scale.zero_()
    assert not model.halves[0].any()  # still a view
    deferred.materialize([model], CPU)
    assert torch.equal(model.weight, expected.weight)


class Reporting(nn.Linear):
    """Logs its calls; with `reads`, the first one fails, because a tensor on the meta device has no values."""

    calls = 0

    def __init__(self, reads: bool):
        super().__init__(2, 2)
        Reporting.calls += 1
        logging.getLogger("a_library").warning("call %d", Reporting.calls)
        if reads:
            self.weight.detach().numpy()


@pytest.mark.parametrize(("reads", "logged"), [(False, ["call 1"]), (True, ["call 2"])])
def test_the_log_of_a_constructor_that_is_called_again_appears_once(
    reads: bool, logged: list[str], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Reporting, "calls", 0)
    built = build_deferred("mine", lambda: Reporting(reads))
    assert (built.deferred is None) == reads and caplog.messages == logged
