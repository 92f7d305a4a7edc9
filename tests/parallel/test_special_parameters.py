"""Frozen, tied, scalar, unused and loaded parameters, in every mode: the numbers of one process."""

import functools
from collections.abc import Callable
from pathlib import Path

import own_models
import pytest
import torch
from parity import COMMON, assert_equal
from ranks import RankError
from torch import nn
from ways import SLICE, WAYS, Way, tier
from worlds import Run, configure, run

from runner.parallel.tp import TP

TOY = ("data=toy", "data.num_train=350", "batch_size=90", *COMMON, "clip_grad_norm=0.5", "optimizer.weight_decay=0.1")
MODELS = ("Tied", "Frozen", "Backbone", "Scaled", "Idle")


def of_model(name: str) -> tuple[str, ...]:
    return ("model=linear", f"model._target_=own_models.{name}", *TOY)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Run]:
    @functools.cache
    def of(model: str, *options: str) -> Run:
        return run(tmp_path_factory.mktemp(model), 1, *of_model(model), *options)

    return of


def _is_apart(way: Way) -> bool:
    """Whether its BatchNorm is another algorithm, or has no place; the model has one stage to train."""
    return way.mode in ("local_sgd", "pipeline") or "parallel.forward=remote" in way.options


def _in_slice(model: str, way: Way) -> bool:
    slices = {"Tied": ("fsdp", "pipeline"), "Scaled": ("fsdp", "tp"), "Idle": ("allreduce", "tp")}
    return way in SLICE and way.mode in slices.get(model, ("zero",))


def _is_thorough(model: str, way: Way) -> bool:
    """Each mode once, and of one model all the options."""
    return way in SLICE or (bool(way.options) and model == "Tied")


@pytest.mark.filterwarnings("ignore:parallel=dp")
@pytest.mark.parametrize(
    ("model", "way"),
    [
        pytest.param(model, way, marks=tier(_in_slice(model, way), _is_thorough(model, way)), id=f"{model}-{way}")
        for model in MODELS
        for way in WAYS
        if not (model == "Backbone" and _is_apart(way))
    ],
)
def test_mode_equals_one_process(model: str, way: Way, reference: Callable[..., Run], tmp_path: Path) -> None:
    expected = reference(model, *way.reference)
    unused = ("parallel.find_unused_parameters=true",) if model == "Idle" and way.mode in ("ddp", "zero") else ()
    spread = run(tmp_path, way.world_size, *of_model(model), *way.words, *unused)
    assert_equal(spread, expected)
    norms = [
        [line["train/grad_norm"] for line in each.lines if "train/grad_norm" in line] for each in (spread, expected)
    ]
    assert norms[0] == pytest.approx(norms[1], rel=1e-9)
    assert spread.state["optimizer"]["state"].keys() == expected.state["optimizer"]["state"].keys()
    assert spread.state["optimizer"]["param_groups"] == expected.state["optimizer"]["param_groups"]


def test_what_is_frozen_stays_as_it_was(reference: Callable[..., Run], tmp_path: Path) -> None:
    """Without a rounding, and without weight decay."""
    made = run(
        tmp_path, 2, *of_model("Frozen"), "parallel=local_sgd", "parallel.every=3", "parallel.outer_momentum=0.9"
    )
    torch.manual_seed(0)
    model = own_models.Frozen([10], 5).double()
    frozen = {name: p for name, p in model.named_parameters() if not p.requires_grad}
    assert len(frozen) == 2 + 6 + 2 + 1
    for each in (made, reference("Frozen")):
        assert all(torch.equal(each.weights[name], p) for name, p in frozen.items())
        assert not torch.equal(each.weights["head.weight"], model.head.weight)
        assert not set(each.state["optimizer"]["param_groups"][0]["params"]) & frozen.keys()
    assert "1,317 parameters, 789 of them trained, fp64" in (made.path / "log.txt").read_text()


def test_tied_parameters_stay_tied_over_a_pipeline(tmp_path: Path) -> None:
    """Over replicas too, and resumed by other modes."""
    words = (*of_model("Tied"), "optimizer=adamw", "micro_batches=4")
    whole = run(tmp_path / "whole", 1, *words, "max_steps=6")
    part = run(tmp_path / "part", 4, *words, "micro_batches=1", "parallel=pipeline", "parallel.stages=2", "max_steps=2")
    for name in ("first.weight", "last.weight"):
        assert torch.equal(part.weights[name], part.weights["first.weight"])
    resume = (f"resume='{part.path}'",)
    run(tmp_path / "1", 2, *resume, "parallel=fsdp", "max_steps=4")
    last = run(tmp_path / "2", 4, *resume, "parallel=pipeline", "micro_batches=1", "max_steps=6")
    assert last.losses == pytest.approx(whole.losses, rel=1e-9)
    assert all(torch.allclose(last.weights[name], tensor, atol=1e-9) for name, tensor in whole.weights.items())
    assert last.state["optimizer"]["state"].keys() == whole.state["optimizer"]["state"].keys()


@pytest.mark.parametrize("mode", ["ddp", "zero"])
def test_what_no_loss_depends_on_is_named(mode: str, tmp_path: Path) -> None:
    """Before it makes copies that drift apart: torch would say so in the second step."""
    named = r"blocks\.0\.unused\.weight, blocks\.0\.unused\.bias and 2 more"
    with pytest.raises(RankError, match=rf"does not depend on {named}.*; try parallel\.find_unused_parameters=true"):
        run(tmp_path, 2, *of_model("Idle"), f"parallel={mode}", "max_steps=1")


@pytest.mark.parametrize(
    "way", [Way("fsdp", 2), Way("pipeline", 2), Way("pipeline", 2, ("parallel.schedule=ZBV",))], ids=str
)
def test_a_constructor_may_load_files(way: Way, tmp_path: Path) -> None:
    torch.manual_seed(7)
    file = tmp_path / "blocks.pt"
    torch.save(own_models.Chain([10], 5).blocks.state_dict(), file)
    words = (*of_model("Loaded"), f"+model.file={file}")
    spread = run(tmp_path / "spread", way.world_size, *words, *way.words)
    assert_equal(spread, run(tmp_path / "one", 1, *words, *way.reference))
    assert "model=linear cannot be built without memory (" in (spread.path / "log.txt").read_text()


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    config, _ = configure(*of_model("Tied"))
    module = own_models.Tied([10], 5)
    module.tensor_plan = lambda: {"first": "rowwise"}
    with_group = TP(tensor=2)
    with_group.axes(2)
    (message,) = with_group.check(config, module)
    assert message.startswith(
        "the model's tensor_plan() cuts first, but first.weight and last.weight are one parameter"
    )
    with pytest.raises(RankError, match=r"InputError: parallel.stages=2 must be at most the 1 stage with parameters"):
        run(tmp_path, 2, *of_model("Backbone"), "parallel=pipeline", "parallel.stages=2")
    with pytest.raises(RankError, match="InputError: model: no parameter has requires_grad"):
        run(tmp_path, 1, "model=linear", "model._target_=test_special_parameters.AllFrozen", *TOY)
    assert not list(tmp_path.glob("run/*"))


def _norms(made: Run) -> list[float]:
    return [line["train/grad_norm"] for line in made.lines if "train/grad_norm" in line]


class AllFrozen(nn.Linear):
    def __init__(self, sample_shape: list[int], num_outputs: int):
        super().__init__(sample_shape[0], num_outputs)
        self.requires_grad_(False)
