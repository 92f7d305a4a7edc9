"""Models that use rarer features of torch train as in one process, or are refused before the run."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from custom_models import Rotary
from mode_cases import Case
from parity import COMMON, assert_equal, losses_of_a_plain_loop
from ranks import RankError
from runner.shipped.data.toy import ToyRegression
from torch import Tensor, nn
from worlds import build_experiment, run

from runner.errors import InputError
from runner.jobs.trained_model import load_trained

TOY = ("data=toy", "data.num_train=90", "batch_size=90", *COMMON, "max_steps=3")


def of_model(name: str) -> tuple[str, ...]:
    return ("model=linear", f"model._target_=test_unusual_models.{name}", *TOY)


@pytest.mark.parametrize(
    "case",
    [
        Case("none", 1),
        Case("fsdp", 2),
        *(
            pytest.param(case, marks=pytest.mark.thorough)
            for case in (Case("ddp", 2), Case("ps", 3), Case("local_sgd", 2))
        ),
    ],
    ids=str,
)
def test_complex_tensors_equal_a_plain_loop(case: Case, tmp_path: Path) -> None:
    made = run(tmp_path, case.world_size, *of_model("Rotary"), *case.overrides)
    torch.manual_seed(0)
    model = Rotary([10], 5)
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = tensor.data.to(torch.complex128 if tensor.is_complex() else torch.float64)
    losses = losses_of_a_plain_loop(model, ToyRegression(True, [10], 5, num_train=90), lr=0.01, num_steps=3)
    assert [made.losses[step] for step in (1, 2, 3)] == pytest.approx(losses, rel=1e-9)
    expected = model.state_dict()
    loaded = load_trained(made.path).state_dict()
    for name, tensor in expected.items():
        torch.testing.assert_close(made.weights[name], tensor, rtol=0, atol=1e-9)
        torch.testing.assert_close(loaded[name], tensor, rtol=0, atol=1e-9)


def test_parameters_of_two_dtypes_are_refused_by_zero() -> None:
    with pytest.raises(InputError, match="parallel=zero needs parameters of one dtype, but the model has complex128"):
        build_experiment(*of_model("Rotary"), "parallel=zero", world_size=2)


@pytest.mark.parametrize("size", [pytest.param(3, marks=pytest.mark.thorough), pytest.param(4, marks=pytest.mark.soak)])
def test_complex_parameters_are_not_sharded(size: int, tmp_path: Path) -> None:
    """torch would drop updates of an unevenly sharded one, which most optimizers view as pairs of real numbers."""
    words = (*of_model("Rotary"), "optimizer=adam", "optimizer.fused=false")
    made, one = run(tmp_path / "made", size, *words, "parallel=fsdp"), run(tmp_path, 1, *words)
    assert made.losses == pytest.approx(one.losses, rel=1e-9)
    for name, tensor in one.weights.items():
        torch.testing.assert_close(made.weights[name], tensor, rtol=0, atol=1e-9)


class Odd(nn.Linear):
    """Has buffers that a conversion to float32 rounds, keeps, or decodes."""

    def __init__(self, sample_shape: list[int], num_outputs: int):
        super().__init__(sample_shape[0], num_outputs)
        self.register_buffer("fine", torch.tensor([0.1], dtype=torch.float64), persistent=False)
        self.register_buffer("whole", torch.tensor([3.0, torch.nan], dtype=torch.float64), persistent=False)
        self.register_buffer("small", torch.tensor([0.5]).to(torch.float8_e4m3fn), persistent=False)


def test_tensors_that_do_not_keep_their_values_are_named() -> None:
    words = of_model("Odd")
    (warning,) = build_experiment(*words, "precision=fp32").warnings
    assert warning.startswith("precision=fp32: fine, small of model=linear had another dtype")
    (warning,) = build_experiment(*words).warnings
    assert warning.startswith("precision=fp64: small of model=linear")


class Empty(nn.Linear):
    """Has a parameter without elements, as Linear(0, n) has."""

    def __init__(self, sample_shape: list[int], num_outputs: int):
        super().__init__(sample_shape[0], num_outputs)
        self.empty = nn.Parameter(torch.zeros(0, 4))

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs) + self.empty.sum()


class SparseEmbedding(nn.Module):
    def __init__(self, sample_shape: list[int], num_outputs: int):
        super().__init__()
        self.embed, self.head = nn.Embedding(3, 8, sparse=True), nn.Linear(8, num_outputs)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.embed(inputs.sign().long() + 1).sum(1))


def test_sparse_gradients_are_refused_by_modes_that_shard() -> None:
    with pytest.raises(InputError, match=r"cannot reduce the sparse gradients of embed; try parallel=ddp"):
        build_experiment(*of_model("SparseEmbedding"), "parallel=fsdp")


class BatchStatistics(nn.Sequential):
    """Normalizes by the statistics of the batch in evaluation mode, too."""

    def __init__(self, sample_shape: list[int], num_outputs: int):
        norm = nn.BatchNorm1d(8, track_running_stats=False)
        super().__init__(nn.Linear(sample_shape[0], 8), norm, nn.Linear(8, num_outputs))

    def stages(self) -> list[nn.Module]:
        return [*self]


class BatchNormAct(nn.BatchNorm1d):
    """A layer with a forward of its own, as in timm: batch norm and an activation."""

    def __init__(self, num_features: int):
        super().__init__(num_features)
        self.act = nn.ReLU(inplace=True)

    def forward(self, input: Tensor) -> Tensor:
        if self.training:
            self.num_batches_tracked.add_(1)
        statistics = (self.running_mean, self.running_var)
        output = F.batch_norm(input, *statistics, self.weight, self.bias, self.training, self.momentum, self.eps)
        return self.act(output)


class OwnNorm(nn.Module):
    """A layer that calls batch_norm and derives from none of torch's."""

    def __init__(self, num_features: int):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(num_features))
        self.register_buffer("mean", torch.zeros(num_features))
        self.register_buffer("square", torch.ones(num_features))

    def forward(self, input: Tensor) -> Tensor:
        return F.batch_norm(input, self.mean, self.square, self.scale, training=self.training)


class CustomNorms(nn.Sequential):
    """Has custom layers that normalize over the batch."""

    def __init__(self, sample_shape: list[int], num_outputs: int):
        width = sample_shape[0]
        first = nn.Sequential(nn.Linear(width, 8, bias=False), BatchNormAct(8))
        last = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, num_outputs))
        super().__init__(first, nn.Sequential(nn.Linear(8, 8, bias=False), OwnNorm(8)), last)

    def stages(self) -> list[nn.Module]:
        return [*self]

    def tensor_plan(self) -> dict[str, str]:
        return {"2.0": "colwise", "2.2": "rowwise"}


def test_custom_norms_are_frozen_and_keep_their_precision(tmp_path: Path) -> None:
    built = build_experiment(*of_model("CustomNorms"), "freeze=[1\\.1]", "parallel=ddp", world_size=2)
    assert [part[1].training for part in [*built.recipe.module][:2]] == [True, False]
    assert any("the statistics of 1 normalization layers" in line for line in built.header_lines)
    words = (*of_model("CustomNorms"), "precision=bf16", "parallel=fsdp", "parallel.mixed_precision=true")
    made = run(tmp_path, 2, *words)
    assert made.losses[3] == pytest.approx(run(tmp_path, 1, *of_model("CustomNorms")).losses[3], rel=0.02)


class Twice(nn.Module):
    """Calls a layer twice, which one of two stages registers under a second name."""

    def __init__(self, sample_shape: list[int], num_outputs: int):
        super().__init__()
        self.first, self.second = nn.Linear(*sample_shape * 2), nn.Linear(*sample_shape * 2)
        self.last = nn.Sequential(nn.Tanh(), self.first, nn.Linear(sample_shape[0], num_outputs))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(self.second(self.first(inputs).tanh()))


class Staged(Twice):
    def stages(self) -> list[nn.Module]:
        return [self.first, nn.Sequential(nn.Tanh(), self.second), nn.Sequential(nn.Tanh(), self.first), self.last[2]]


class Named(nn.Module):
    """Has attributes with the names of the methods that describe a model's structure."""

    def __init__(self, sample_shape: list[int], num_outputs: int):
        super().__init__()
        self.stages = nn.Sequential(nn.Linear(sample_shape[0], 8), nn.Tanh())
        self.tensor_plan = {"place": 1}
        self.last = nn.Linear(8, num_outputs)

    def place(self) -> nn.Module:
        return self.last

    def forward(self, inputs: Tensor) -> Tensor:
        return self.place()(self.stages(inputs))


def test_attributes_that_are_no_description_of_the_structure(tmp_path: Path) -> None:
    reference = run(tmp_path, 1, *of_model("Named"))
    assert_equal(run(tmp_path, 2, *of_model("Named"), "parallel=fsdp"), reference)
    for mode, method in (("pipeline", "stages"), ("tp", "tensor_plan")):
        with pytest.raises(InputError, match=rf"parallel={mode} needs a model .* {method}\(\)"):
            build_experiment(*of_model("Named"), f"parallel={mode}", world_size=2)


class Bounded(nn.Module):
    """Has an embedding whose forward scales the rows that it looks up."""

    def __init__(self, sample_shape: list[int], num_outputs: int):
        super().__init__()
        self.embedding, self.head = nn.Embedding(16, 4, max_norm=0.5), nn.Linear(4, num_outputs)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.embedding((4 * inputs[:, :3]).long() % 16).mean(1))


@pytest.mark.parametrize("mode", ["ddp", "fsdp", "ps"])
def test_parameters_that_forward_changes_are_refused_on_several_ranks(mode: str) -> None:
    with pytest.raises(InputError, match=f"parallel={mode}: the forward of model=linear changes embedding.weight in"):
        build_experiment(*of_model("Bounded"), f"parallel={mode}", world_size=2)


class Penalized(nn.Module):
    """Returns its output plus the gradient of the output with respect to the input."""

    def __init__(self, sample_shape: list[int], num_outputs: int):
        super().__init__()
        self.first, self.norm = nn.Linear(sample_shape[0], 8), nn.BatchNorm1d(8)
        self.last = nn.Linear(8, num_outputs)

    def forward(self, inputs: Tensor) -> Tensor:
        with torch.enable_grad():
            inputs = inputs.requires_grad_()
            outputs = self.last(self.norm(self.first(inputs)).tanh())
            (gradient,) = torch.autograd.grad(outputs.sum(), inputs, create_graph=True)
        return outputs + gradient[:, : outputs.size(1)]


@pytest.mark.parametrize(
    ("name", "case"),
    [
        ("Empty", Case("fsdp", 2)),
        ("BatchStatistics", Case("ddp", 2)),
        pytest.param("BatchStatistics", Case("fsdp", 2), marks=pytest.mark.soak),
        pytest.param("BatchStatistics", Case("pipeline", 2), marks=pytest.mark.thorough),
        ("CustomNorms", Case("ddp", 4)),
        ("CustomNorms", Case("fsdp", 2)),
        *(
            pytest.param("CustomNorms", case, marks=pytest.mark.thorough)
            for case in (*(Case(mode, 2) for mode in ("allreduce", "zero", "pipeline", "tp")), Case("ps", 3))
        ),
        pytest.param("CustomNorms", Case("pipeline", 4, ("parallel.stages=2",)), marks=pytest.mark.thorough),
        ("Twice", Case("fsdp", 2)),
        pytest.param("Twice", Case("ps", 3, ("parallel.forward=remote",)), marks=pytest.mark.thorough),
        pytest.param("Staged", Case("fsdp", 2), marks=pytest.mark.soak),
        ("Staged", Case("pipeline", 2)),
        ("Penalized", Case("fsdp", 2)),
        pytest.param("Penalized", Case("ddp", 4), marks=pytest.mark.thorough),
    ],
    ids=str,
)
def test_the_model_equals_one_process(name: str, case: Case, tmp_path: Path) -> None:
    # With 92 samples, two ranks of four have none of the last batch.
    is_uneven = name == "Penalized" or case == Case("ddp", 4)
    words = (*of_model(name), *(["data.num_train=92"] if is_uneven else []))
    made = run(tmp_path / "made", case.world_size, *words, *case.overrides)
    assert_equal(made, run(tmp_path, 1, *words, *case.reference))


class Centered(nn.Module):
    """Subtracts a moving average of its inputs, and normalizes."""

    def __init__(self, sample_shape: list[int], num_outputs: int):
        super().__init__()
        self.layer, self.norm = nn.Linear(sample_shape[0], num_outputs), nn.BatchNorm1d(num_outputs)
        self.register_buffer("center", torch.zeros(sample_shape))

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.center.lerp_(inputs.detach().mean(0), 0.1)
        return self.norm(self.layer(inputs - self.center))


@pytest.mark.parametrize(
    "case",
    [
        Case("ddp", 2),
        Case("fsdp", 2),
        pytest.param(Case("ps", 3), marks=pytest.mark.thorough),
        pytest.param(Case("allreduce", 2), marks=pytest.mark.soak),
    ],
    ids=str,
)
def test_buffers_that_differ_between_ranks_are_reported_once(case: Case, tmp_path: Path) -> None:
    log = (run(tmp_path, case.world_size, *of_model("Centered"), *case.overrides).path / "log.txt").read_text()
    assert log.count("buffers differ between ranks after step 1: center; ") == log.count("differ between ranks") == 1


def test_buffers_of_replicas_that_train_separately_are_not_compared(tmp_path: Path) -> None:
    made = run(tmp_path, 2, *of_model("Centered"), "parallel=local_sgd")
    assert "differ between ranks" not in (made.path / "log.txt").read_text()


class Replacing(nn.Module):
    """Replaces its layer in training steps. Calls before the run do not count as steps."""

    def __init__(self, num_outputs: int):
        super().__init__()
        self.layer, self.calls = nn.Linear(8, num_outputs), 0

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls += self.training
        if self.calls > 5:
            self.layer = nn.Linear(8, self.layer.out_features, dtype=inputs.dtype)
        return self.layer(inputs)


class Replaces(nn.Sequential):
    """Has a last submodule that replaces a layer."""

    def __init__(self, sample_shape: list[int], num_outputs: int):
        super().__init__(nn.Linear(sample_shape[0], 8), Replacing(num_outputs))

    def stages(self) -> list[nn.Module]:
        return [*self]


@pytest.mark.fault("a model that replaces a layer in forward", outcome="refused")
@pytest.mark.parametrize("case", [Case("none", 1), Case("ddp", 2), Case("pipeline", 2)], ids=str)
def test_a_replaced_parameter_is_named(case: Case, tmp_path: Path) -> None:
    with pytest.raises(
        RankError, match=r"JobFailed: rank . on .*:\nthe model has replaced the parameter 1.layer.weight of a Linear"
    ):
        run(tmp_path, case.world_size, *of_model("Replaces"), *case.overrides, "max_steps=10")


class Renewed(nn.Linear):
    """Replaces its weight in training or evaluation. fully_shard would restore the original one after the forward."""

    def __init__(self, sample_shape: list[int], num_outputs: int, in_training: bool):
        super().__init__(sample_shape[0], num_outputs)
        self.in_training = in_training

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training == self.in_training:
            self.weight = nn.Parameter(torch.zeros(self.weight.shape, dtype=inputs.dtype))
        return super().forward(inputs)


@pytest.mark.fault("a model that replaces a layer in forward", outcome="refused")
@pytest.mark.parametrize("in_training", [True, False])
def test_a_parameter_that_forward_replaces_is_refused(in_training: bool) -> None:
    model = (*of_model("Renewed"), f"+model.in_training={in_training}")
    with pytest.raises(InputError, match="model=linear: its forward replaces the parameter weight, which "):
        build_experiment(*model, "parallel=fsdp", world_size=2)


class Cached(nn.Linear):
    """Creates a buffer in a forward of many samples, which only the first of two ranks calls."""

    def __init__(self, sample_shape: list[int], num_outputs: int):
        super().__init__(sample_shape[0], num_outputs)
        self.register_buffer("cache", None, persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        if self.cache is None and self.training and len(inputs) >= 23:
            self.cache = torch.ones(())
        return super().forward(inputs)


@pytest.mark.fault("a buffer that forward creates on one rank", outcome="survived")
@pytest.mark.parametrize("case", [Case("ddp", 2), pytest.param(Case("ps", 3), marks=pytest.mark.thorough)], ids=str)
def test_a_buffer_that_forward_creates_on_one_rank(case: Case, tmp_path: Path) -> None:
    words = (*of_model("Cached"), "batch_size=45")
    assert_equal(run(tmp_path, case.world_size, *words, *case.overrides), run(tmp_path / "one", 1, *words))


class Resized(nn.Linear):
    """Changes the shape of a buffer in training, where the parameter server does not call it."""

    def __init__(self, sample_shape: list[int], num_outputs: int):
        super().__init__(sample_shape[0], num_outputs)
        self.register_buffer("seen", torch.zeros(0))

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.seen = inputs.detach()[:1]
        return super().forward(inputs)


@pytest.mark.fault("a buffer of another shape on the parameter server", outcome="refused")
def test_a_buffer_of_another_shape_is_named(tmp_path: Path) -> None:
    with pytest.raises(RankError, match=r"forward has changed the shape of the buffer seen from \[0\] to \[1, 10\]"):
        run(tmp_path, 2, *of_model("Resized"), "parallel=ps")


@pytest.mark.fault("a forward that changes parameters before the run", outcome="survived")
def test_the_dry_run_leaves_the_weights_unchanged() -> None:
    module = build_experiment(*of_model("Bounded")).recipe.module
    torch.manual_seed(0)
    torch.testing.assert_close(module.state_dict(), Bounded([10], 5).double().state_dict(), rtol=0, atol=0)
