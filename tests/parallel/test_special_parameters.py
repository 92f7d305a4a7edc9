"""Frozen, tied, scalar, unused and loaded parameters, in every mode: the numbers of one process."""

from collections.abc import Callable
from pathlib import Path

import custom_models
import pytest
import torch
from mode_cases import CASES, ONCE, Case, tier
from parity import COMMON, assert_equal
from ranks import RankError
from torch import nn
from worlds import Run, configure, run

from runner.parallel.tp import TP

TOY = ("data=toy", "data.num_train=350", "batch_size=90", *COMMON, "clip_grad_norm=0.5", "optimizer.weight_decay=0.1")
MODELS = ("Tied", "Frozen", "Backbone", "Scaled", "Idle")


def of_model(name: str) -> tuple[str, ...]:
    return ("model=linear", f"model._target_=custom_models.{name}", *TOY)


@pytest.fixture
def reference(one_process: Callable[..., Run]) -> Callable[..., Run]:
    return lambda model, *options: one_process(*of_model(model), *options)


def _is_unsupported(case: Case) -> bool:
    """Return True if BatchNorm is another algorithm in this case, or the model has too few stages to train."""
    return case.mode in ("local_sgd", "pipeline") or "parallel.forward=remote" in case.options


def _in_slice(model: str, case: Case) -> bool:
    slices = {"Tied": ("fsdp", "pipeline"), "Scaled": ("fsdp", "tp"), "Idle": ("allreduce", "tp")}
    return case in ONCE and case.mode in slices.get(model, ("zero",))


@pytest.mark.filterwarnings("ignore:parallel=dp")
@pytest.mark.parametrize(
    ("model", "case"),
    [
        pytest.param(
            model,
            case,
            marks=tier(_in_slice(model, case), case in ONCE and model in ("Tied", "Frozen", "Idle")),
            id=f"{model}-{case}",
        )
        for model in MODELS
        for case in CASES
        if not (model == "Backbone" and _is_unsupported(case))
    ],
)
def test_mode_equals_one_process(model: str, case: Case, reference: Callable[..., Run], tmp_path: Path) -> None:
    expected = reference(model, *case.reference)
    unused = ("parallel.find_unused_parameters=true",) if model == "Idle" and case.mode in ("ddp", "zero") else ()
    made = run(tmp_path, case.world_size, *of_model(model), *case.overrides, *unused)
    assert_equal(made, expected)
    assert made.state["optimizer"]["state"].keys() == expected.state["optimizer"]["state"].keys()
    assert made.state["optimizer"]["param_groups"] == expected.state["optimizer"]["param_groups"]


def test_frozen_parameters_stay_unchanged(reference: Callable[..., Run], tmp_path: Path) -> None:
    """Neither rounding nor weight decay changes them."""
    made = run(
        tmp_path, 2, *of_model("Frozen"), "parallel=local_sgd", "parallel.every=3", "parallel.outer_momentum=0.9"
    )
    torch.manual_seed(0)
    model = custom_models.Frozen([10], 5).double()
    frozen = {name: p for name, p in model.named_parameters() if not p.requires_grad}
    assert len(frozen) == 2 + 6 + 2 + 1
    for each in (made, reference("Frozen")):
        assert all(torch.equal(each.weights[name], p) for name, p in frozen.items())
        assert not torch.equal(each.weights["head.weight"], model.head.weight)
        assert not set(each.state["optimizer"]["param_groups"][0]["params"]) & frozen.keys()
    assert "1,317 parameters, 789 of them trained, fp64" in (made.path / "log.txt").read_text()


def test_tied_parameters_stay_tied_over_a_pipeline(tmp_path: Path) -> None:
    """Also with replicas, and when other modes resume the run."""
    overrides = (*of_model("Tied"), "optimizer=adamw", "micro_batches=4")
    whole = run(tmp_path / "whole", 1, *overrides, "max_steps=6")
    part = run(
        tmp_path / "part", 4, *overrides, "micro_batches=1", "parallel=pipeline", "parallel.stages=2", "max_steps=2"
    )
    for name in ("first.weight", "last.weight"):
        assert torch.equal(part.weights[name], part.weights["first.weight"])
    resume = (f"resume='{part.path}'",)
    run(tmp_path / "1", 2, *resume, "parallel=fsdp", "max_steps=4")
    last = run(tmp_path / "2", 4, *resume, "parallel=pipeline", "micro_batches=1", "max_steps=6")
    assert last.losses == pytest.approx(whole.losses, rel=1e-9)
    assert all(torch.allclose(last.weights[name], tensor, atol=1e-9) for name, tensor in whole.weights.items())
    assert last.state["optimizer"]["state"].keys() == whole.state["optimizer"]["state"].keys()


@pytest.mark.parametrize("mode", ["ddp", "zero"])
def test_parameters_that_no_loss_depends_on_are_named(mode: str, tmp_path: Path) -> None:
    """The first step fails, before replicas diverge; torch would report it in the second step."""
    named = r"blocks\.0\.unused\.weight, blocks\.0\.unused\.bias and 2 more"
    with pytest.raises(RankError, match=rf"does not depend on {named}.*; try parallel\.find_unused_parameters=true"):
        run(tmp_path, 2, *of_model("Idle"), f"parallel={mode}", "max_steps=1")


@pytest.mark.parametrize(
    "case", [Case("fsdp", 2), Case("pipeline", 2), Case("pipeline", 2, ("parallel.schedule=ZBV",))], ids=str
)
def test_a_constructor_may_load_files(case: Case, tmp_path: Path) -> None:
    torch.manual_seed(7)
    file = tmp_path / "blocks.pt"
    torch.save(custom_models.Chain([10], 5).blocks.state_dict(), file)
    overrides = (*of_model("Loaded"), f"+model.file={file}")
    made = run(tmp_path / "made", case.world_size, *overrides, *case.overrides)
    assert_equal(made, run(tmp_path / "one", 1, *overrides, *case.reference))
    assert "model=linear cannot be built on the meta device (" in (made.path / "log.txt").read_text()


def test_unsuitable_models_are_refused(tmp_path: Path) -> None:
    config, _ = configure(*of_model("Tied"))
    module = custom_models.Tied([10], 5)
    module.tensor_plan = lambda: {"first": "rowwise"}
    with_group = TP(tensor=2)
    with_group.axes(2)
    (message,) = with_group.check(config, module)
    assert message.startswith("the model's tensor_plan() shards first, which would untie first.weight and last.weight")
    with pytest.raises(RankError, match=r"InputError: parallel.stages=2 must be at most the 1 stage with parameters"):
        run(tmp_path, 2, *of_model("Backbone"), "parallel=pipeline", "parallel.stages=2")
    with pytest.raises(RankError, match="InputError: model: no parameter has requires_grad"):
        run(tmp_path, 1, "model=linear", "model._target_=test_special_parameters.AllFrozen", *TOY)
    assert not list(tmp_path.glob("run/*"))


class AllFrozen(nn.Linear):
    def __init__(self, sample_shape: list[int], num_outputs: int):
        super().__init__(sample_shape[0], num_outputs)
        self.requires_grad_(False)
