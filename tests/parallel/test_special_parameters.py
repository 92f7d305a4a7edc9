"""Frozen, tied, grouped, averaged, scalar, unused and loaded parameters, in every mode: the numbers of one process."""

from collections.abc import Callable
from pathlib import Path

import custom_models
import pytest
import torch
from mode_cases import CASES, ONCE, Case, tier
from parity import COMMON, assert_equal
from ranks import RankError
from torch import nn
from worlds import Run, build_experiment, configure, run, unconnected

from runner.errors import InputError
from runner.parallel.tp import TP
from runner.training.build import build

TOY = ("data=toy", "data.num_train=350", "batch_size=90", *COMMON, "clip_grad_norm=0.5", "optimizer.weight_decay=0.1")
MODELS = ("Mixed", "Scaled", "Idle")
GROUPS = (
    "optimizer.groups=[{match: '^embed', lr: 0.03, momentum: 0.5},"
    "{match: '^head.*bias', lr: 0.001, weight_decay: 0.2, nesterov: true},"
    "{match: down.weight$, weight_decay: 0.01}]"
)
# An average, with evaluations between the steps: the next step must not use parameters that were gathered of it.
EMA = ("ema.decay=0.8", "ema.warmup_steps=4", "eval_every_steps=3")


class Mixed(custom_models.Tied):
    """A model with tied and frozen parameters, and BatchNorm."""

    def __init__(self, sample_shape: list[int], num_outputs: int):
        super().__init__(sample_shape, num_outputs)
        self.blocks[3].norm = nn.BatchNorm1d(8)
        self.blocks[1].requires_grad_(False)


def of_model(name: str) -> tuple[str, ...]:
    return ("model=linear", f"model._target_=custom_models.{name}", *TOY)


def _overrides(model: str, case: Case) -> tuple[str, ...]:
    """Return the overrides of a model; those of Mixed also have parameter groups and an average (ema)."""
    if model != "Mixed":
        return of_model(model)
    overrides = (*TOY, "micro_batches=2", "scheduler=cosine", GROUPS)
    if case.mode == "local_sgd" or "parallel.forward=remote" in case.options:  # without BatchNorm
        ema = () if case.mode == "local_sgd" else EMA
        return ("model=linear", "model._target_=custom_models.Tied", *overrides, *ema)
    return ("model=linear", "model._target_=test_special_parameters.Mixed", *overrides, *EMA)


# The modes that treat these parameters differently; the default tier has the first one.
DIFFERENT = {
    "Mixed": ("zero", "fsdp", "local_sgd"),
    "Idle": ("allreduce", "ddp", "zero"),
    "Scaled": ("fsdp", "tp"),
}


def _tier(model: str, case: Case) -> tuple[pytest.MarkDecorator, ...]:
    modes = DIFFERENT[model]
    return tier(case in ONCE and case.mode == modes[0], case in ONCE and case.mode in modes)


@pytest.mark.filterwarnings("ignore:parallel=dp")
@pytest.mark.parametrize(
    ("model", "case"),
    [
        pytest.param(model, case, marks=_tier(model, case), id=f"{model}-{case}")
        for model in MODELS
        for case in CASES
        if case.mode != "none" and (model == "Mixed" or not case.options)
    ],
)
def test_mode_equals_one_process(model: str, case: Case, one_process: Callable[..., Run], tmp_path: Path) -> None:
    overrides = _overrides(model, case)
    factor = 2 if model == "Mixed" else 1
    split = (f"micro_batches={4 * factor}",) if case.mode == "pipeline" else ()
    expected = one_process(*overrides, *split)
    unused = ("parallel.find_unused_parameters=true",) if model == "Idle" and case.mode in ("ddp", "zero") else ()
    made = run(tmp_path, case.world_size, *overrides, *case.overrides, *unused)
    assert_equal(made, expected)
    assert _rates(made) == pytest.approx(_rates(expected), rel=1e-12)
    optimizer, of_reference = made.state["optimizer"], expected.state["optimizer"]
    assert optimizer["state"].keys() == of_reference["state"].keys()
    for group, reference in zip(optimizer["param_groups"], of_reference["param_groups"], strict=True):
        assert group | {"lr": 0} == reference | {"lr": 0} and group["lr"] == pytest.approx(reference["lr"])
    if EMA[0] in overrides:
        average, of_reference = made.state["average"], expected.state["average"]
        assert average.keys() == of_reference.keys()
        for name, tensor in of_reference.items():
            torch.testing.assert_close(average[name], tensor, rtol=0, atol=1e-9)
        assert {"first.weight", "last.weight"} <= average.keys()
        assert "parallel.forward=remote" in case.options or "blocks.1.up.weight" not in average  # frozen


def _rates(made: Run) -> dict[int, float]:
    return {line["step"]: line["train/learning_rate"] for line in made.lines if "train/learning_rate" in line}


def test_frozen_parameters_stay_unchanged(tmp_path: Path) -> None:
    """Neither rounding nor weight decay changes them."""
    made = run(
        tmp_path, 2, *of_model("Frozen"), "parallel=local_sgd", "parallel.every=3", "parallel.outer_momentum=0.9"
    )
    torch.manual_seed(0)
    model = custom_models.Frozen([10], 5).double()
    frozen = {name: p for name, p in model.named_parameters() if not p.requires_grad}
    assert len(frozen) == 2 + 6 + 2 + 1
    assert all(torch.equal(made.weights[name], p) for name, p in frozen.items())
    assert not torch.equal(made.weights["head.weight"], model.head.weight)
    assert not set(made.state["optimizer"]["param_groups"][0]["params"]) & frozen.keys()
    assert "1,317 parameters, 789 of them trained, fp64" in (made.path / "log.txt").read_text()


def test_parameters_that_no_loss_depends_on_are_named_before_the_run() -> None:
    named = r"the loss does not depend on blocks\.0\.unused\.weight, blocks\.0\.unused\.bias, .*unused"
    for mode in ("ddp", "zero"):
        with pytest.raises(InputError, match=f"parallel={mode} needs .*{named}.*; try parallel.find_unused_parameters"):
            build_experiment(*of_model("Idle"), f"parallel={mode}")
    build_experiment(*of_model("Idle"), "parallel=ddp", "parallel.find_unused_parameters=true")
    config, request = configure(*of_model("Idle"), "parallel=ddp")
    build(config, request.command.choices, unconnected(), trains=False)  # for an evaluation
    build_experiment(*of_model("Idle"), "parallel=ddp", "freeze=[unused]")


class Skipping(nn.Module):
    """Skips its second layer with a small probability, as in layer dropout (Fan, Grave, Joulin, 2019)."""

    def __init__(self, sample_shape: list[int], num_outputs: int, draw: str = "rand"):
        super().__init__()
        self.first, self.last = nn.Linear(sample_shape[0], num_outputs), nn.Linear(num_outputs, num_outputs)
        self.draw = draw

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.first(inputs)
        if self.draw == "rand":
            skips = torch.rand([]) < 1e-4
        elif self.draw == "uniform":
            skips = torch.zeros(1).uniform_() > 0.9999
        else:
            skips = torch.bernoulli(torch.full((1,), 1e-4)) == 1
        return hidden if self.training and skips else self.last(hidden)


@pytest.mark.parametrize("draw", ["rand", "uniform", "bernoulli"])
def test_layers_that_are_rarely_skipped_are_named_before_the_run(draw: str) -> None:
    of_model = ("model=linear", "model._target_=test_special_parameters.Skipping", *TOY, f"+model.draw={draw}")
    named = r"with some random numbers the loss does not depend on last\.weight, last\.bias"
    with pytest.raises(InputError, match=f"parallel=ddp .*{named}; try parallel.find_unused_parameters=true"):
        build_experiment(*of_model, "parallel=ddp")
    build_experiment(*of_model, "parallel=ddp", "parallel.find_unused_parameters=true")


class Router(nn.Module):
    """Uses an expert for each kind of samples, as a mixture of experts does; the step `idle` is the last one."""

    def __init__(self, sample_shape: list[int], num_outputs: int, idle: int = 99):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(sample_shape[0], num_outputs) for _ in range(2))
        self.idle, self.step = idle, 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.step += self.training
        used = [self.experts[0](inputs)]
        if len(inputs) > 2 and self.step < self.idle:
            used.append(self.experts[1](inputs))
        return torch.stack(used).sum(0)


def test_parameters_that_depend_on_the_samples_are_named_in_the_first_step_without_them(tmp_path: Path) -> None:
    """That step fails, before replicas diverge; torch would report it in the next step."""
    router = ("model=linear", "model._target_=test_special_parameters.Router", *TOY, "parallel=ddp", "max_steps=2")
    run(tmp_path, 2, *router)
    named = r"does not depend on experts\.1\.weight, experts\.1\.bias.*; try parallel\.find_unused_parameters=true"
    with pytest.raises(RankError, match=named):
        run(tmp_path, 2, *router, "+model.idle=2")


@pytest.mark.parametrize(
    "case",
    [Case("fsdp", 2), pytest.param(Case("pipeline", 2, ("parallel.schedule=ZBV",)), marks=pytest.mark.thorough)],
    ids=str,
)
def test_a_constructor_may_load_files(case: Case, tmp_path: Path) -> None:
    torch.manual_seed(7)
    file = tmp_path / "blocks.pt"
    torch.save(custom_models.Chain([10], 5).blocks.state_dict(), file)
    overrides = (*of_model("Loaded"), f"+model.file={file}")
    made = run(tmp_path / "made", case.world_size, *overrides, *case.overrides)
    assert_equal(made, run(tmp_path / "one", 1, *overrides, *case.reference))
    assert "model=linear cannot be built on the meta device (" in (made.path / "log.txt").read_text()


def test_unsuitable_models_are_refused() -> None:
    module = custom_models.Tied([10], 5)
    module.tensor_plan = lambda: {"first": "rowwise"}
    (message,) = TP(tensor=2).at(2).check(module, "none")
    assert message.startswith("the model's tensor_plan() shards first, which would untie first.weight and last.weight")
    with pytest.raises(InputError, match=r"parallel.stages=2 x 1 per rank must be at most 1"):
        build_experiment(*of_model("Backbone"), "parallel=pipeline", "parallel.stages=2", world_size=2)
    with pytest.raises(InputError, match="model: no parameter has requires_grad"):
        build_experiment("model=linear", "model._target_=test_special_parameters.AllFrozen", *TOY)


class AllFrozen(nn.Linear):
    def __init__(self, sample_shape: list[int], num_outputs: int):
        super().__init__(sample_shape[0], num_outputs)
        self.requires_grad_(False)
