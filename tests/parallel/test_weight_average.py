"""ema.decay: torch's own average in every mode, evaluated in the place of the weights, exact over a resume."""

import functools
import shutil
from collections.abc import Callable
from pathlib import Path

import own_models
import pytest
import torch
from parity import COMMON, assert_equal
from ranks import RankError
from torch import nn
from torch.optim.swa_utils import AveragedModel
from ways import SLICE as ON_TWO
from ways import WAYS, Way
from worlds import Run, configure, run

from runner.distributed.backend import Backend
from runner.distributed.environment import RankInfo
from runner.distributed.world import World
from runner.errors import InputError, Preempted
from runner.runs.train_state import available
from runner.training import trainer
from runner.training.build import build
from runner.training.evaluation import evaluate

EMA = ("ema.decay=0.8", "ema.warmup_steps=4")
DATA = ("data=toy", "data.num_train=350", "batch_size=90", *COMMON)
# Evaluations on the way: what they gather of the average must not be what the next step goes by.
OFTEN = ("eval_every_steps=3", "checkpoint.every_steps=3")


class Mixed(own_models.Tied):
    """Tied and frozen parameters, and statistics that move."""

    def __init__(self, sample_shape: list[int], num_outputs: int):
        super().__init__(sample_shape, num_outputs)
        self.blocks[3].norm = nn.BatchNorm1d(8)
        self.blocks[1].requires_grad_(False)


MIXED = ("model=linear", "model._target_=test_weight_average.Mixed", "micro_batches=2", *DATA, *OFTEN, *EMA)
TOY = ("model=toy", *DATA, *OFTEN, *EMA)


def _carries_mixed(way: Way) -> bool:
    """Of the ways on two ranks, or with options of their own, all that average and have a place for BatchNorm."""
    return (way in ON_TWO or bool(way.options)) and not (
        way.mode in ("local_sgd", "none") or "parallel.forward=remote" in way.options
    )


OWN = f"--config-dir={Path(__file__).parent / 'own'}"
TWO_LOSSES = (OWN, "model=codes", "data=figures", "objective=adversarial", *COMMON, "batch_size=14", *OFTEN, *EMA)
PARITY = [
    *((MIXED, way) for way in WAYS if _carries_mixed(way)),
    (TOY, Way("ps", 3, ("parallel.forward=remote",))),  # BatchNorm has no place there
    (TOY, Way("ps", 2, ("parallel.updates=async", "parallel.forward=remote"))),  # of one trainer: in turn
    (MIXED, Way("fsdp", 2, ("parallel.reshard_after_forward=false",))),
    (TWO_LOSSES, Way("fsdp", 2, ("parallel.meta_init=false",))),
]
SLICE = ("fsdp-2-reshard_after_forward=false", "pipeline-2", "ps-2", "ps-2-updates=async-forward=remote")


def average_of(made: Run) -> dict[str, torch.Tensor]:
    average: dict[str, torch.Tensor] = made.state["average"]
    return average


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Run]:
    @functools.cache
    def of(*words: str) -> Run:
        return run(tmp_path_factory.mktemp("reference"), 1, *words)

    return of


def test_one_process_gives_what_a_loop_with_torchs_averaged_model_does(reference: Callable[..., Run]) -> None:
    """AveragedModel begins as the model is when it is told of it first, and copies the model's buffers."""
    words = ("model=mlp", "model.batch_norm=true", "data.sample_shape=[1,8,8]", "batch_size=350", *COMMON, *EMA)
    made = reference(*words)
    config, request = configure(*words)
    experiment = build(config, request.choices, World(RankInfo(0, 0, 1, 1), None, Backend()))
    module = experiment.recipe.module
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01, momentum=0.9)

    def combine(mean: torch.Tensor, now: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
        decay = min(0.8, (1 + number.item()) / (4 + number.item()))
        return decay * mean + (1 - decay) * now

    averaged = AveragedModel(module, avg_fn=combine)
    averaged.update_parameters(module)
    for epoch in range(2):
        for batch in experiment.train_loader.steps(epoch):
            inputs, targets = batch.micro_batches[0].data
            nn.functional.cross_entropy(module(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
            averaged.update_parameters(module)
    assert averaged.n_averaged == 11  # the ten steps, and the beginning
    for name, parameter in averaged.module.named_parameters():
        torch.testing.assert_close(average_of(made)[name], parameter.detach(), rtol=1e-12, atol=1e-12)
    assert made.state["averaged_steps"] == 10
    assert not average_of(made).keys() & dict(module.named_buffers()).keys()

    averaged.eval()
    batches = [batch.micro_batches[0].data for batch in experiment.val_loader.steps(0)]
    inputs, targets = (torch.cat(parts) for parts in zip(*batches, strict=True))
    expected = nn.functional.cross_entropy(averaged(inputs), targets).item()
    assert made.result["metrics"]["val/loss"] == pytest.approx(expected, rel=1e-12)


@pytest.mark.filterwarnings("ignore:parallel=dp")
@pytest.mark.parametrize(
    ("words", "way"),
    [
        pytest.param(*cell, id=str(cell[1]), marks=() if str(cell[1]) in SLICE else pytest.mark.thorough)
        for cell in PARITY
    ],
)
def test_every_mode_gives_the_average_of_one_process(
    words: tuple[str, ...], way: Way, reference: Callable[..., Run], tmp_path: Path
) -> None:
    micro_batches = ("micro_batches=8",) if way.mode == "pipeline" else ()  # it cuts each of two into four
    expected = reference(*words, *micro_batches)
    spread = run(tmp_path, way.world_size, *words, *way.words)
    assert_equal(spread, expected)
    assert [line["val/loss"] for line in spread.lines if "val/loss" in line] == pytest.approx(
        [line["val/loss"] for line in expected.lines if "val/loss" in line], rel=1e-9
    )
    assert average_of(spread).keys() == average_of(expected).keys()
    for name, tensor in average_of(expected).items():
        torch.testing.assert_close(average_of(spread)[name], tensor, rtol=0, atol=1e-9)
        assert not torch.allclose(tensor, expected.weights[name], atol=1e-6)
    if words is MIXED:
        assert {"first.weight", "last.weight"} <= average_of(spread).keys()
        assert "blocks.1.up.weight" not in average_of(spread)  # frozen: it would be what it is


def test_a_resumed_run_ends_at_the_same_average_to_the_bit(tmp_path: Path) -> None:
    """And in another mode at the same numbers; an evaluation of the checkpoint repeats that of the run."""
    whole = run(tmp_path, 2, *MIXED, "precision=fp32", "parallel=fsdp")
    assert "ema      decay 0.8, warm-up 4: " in (whole.path / "log.txt").read_text()
    expected, losses = whole.state, whole.losses
    evaluated = {key: value for key, value in whole.result["metrics"].items() if key.startswith("val/")}
    of = ("task=evaluate", f"run={whole.path}", "parallel=none")
    assert run(tmp_path / "one", 1, *of).result["metrics"] == pytest.approx(evaluated, rel=1e-5)
    own = run(tmp_path / "own", 1, *of, "ema.decay=null", "ema.warmup_steps=0")
    assert own.result["metrics"]["val/loss"] != pytest.approx(evaluated["val/loss"], rel=1e-3)
    assert "weights: the model's own, not averaged" in (own.path / "log.txt").read_text()

    cut = tmp_path / "cut"
    shutil.copytree(whole.path, cut, symlinks=True)
    for path in available(cut / "checkpoints")[:0:-1]:
        shutil.rmtree(path)
    shutil.copytree(cut, tmp_path / "other", symlinks=True)
    resumed = run(tmp_path, 2, f"resume={cut}")
    assert resumed.losses == losses
    assert resumed.result["metrics"] == whole.result["metrics"]
    for part in ("model", "average"):
        assert all(torch.equal(resumed.state[part][name], tensor) for name, tensor in expected[part].items()), part
    other = run(tmp_path, 2, f"resume={tmp_path / 'other'}", "parallel=pipeline", "parallel.micro_batches=1")
    for name, tensor in expected["average"].items():
        torch.testing.assert_close(average_of(other)[name], tensor, rtol=1e-4, atol=1e-5)


def test_it_can_be_turned_on_and_off_on_resume(tmp_path: Path) -> None:
    off = ("ema.decay=null", "ema.warmup_steps=0")
    part = run(tmp_path, 1, *TOY, *off, "max_steps=3")
    start = part.weights
    resume = (f"resume={part.path}",)
    run(tmp_path, 1, *resume, "ema.decay=0.8", "max_steps=4")
    now, average = part.weights, average_of(part)
    assert average.keys() == start.keys()
    for name, tensor in start.items():
        torch.testing.assert_close(average[name], 0.8 * tensor + 0.2 * now[name])
    assert part.state["averaged_steps"] == 1
    assert (
        "ema.decay=0.8: the checkpoint has no average; it begins with its weights"
        in (part.path / "log.txt").read_text()
    )
    run(tmp_path, 1, *resume, *off, "max_steps=5")
    assert "average" not in part.state
    assert "the checkpoint's average of the weights (ema) is dropped" in (part.path / "log.txt").read_text()


def test_a_run_that_is_stopped_in_an_evaluation_saves_the_weights_themselves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = (*TOY, "checkpoint.every_steps=null")  # so that the first one is taken when it has been stopped
    whole = run(tmp_path / "whole", 1, *words)

    def stopped(*args: object) -> dict[str, float]:
        evaluate(*args)  # type: ignore[arg-type]
        raise Preempted("a signal")

    monkeypatch.setattr(trainer, "evaluate", stopped)
    with pytest.raises(RankError, match="Preempted"):
        run(tmp_path / "cut", 1, *words)
    monkeypatch.undo()
    (path,) = (tmp_path / "cut" / "run").iterdir()
    assert "saved after step 3" in (path / "log.txt").read_text()
    resumed = run(tmp_path / "cut", 1, f"resume={path}")
    assert resumed.result["weights_sha256"] == whole.result["weights_sha256"]
    assert all(torch.equal(average_of(resumed)[name], tensor) for name, tensor in average_of(whole).items())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("ema.decay=1",), "ema.decay=1 must be above 0 and below 1, or null; try 0.999"),
        (
            ("ema.warmup_steps=10",),
            "ema.warmup_steps=10 has no effect without ema.decay; add ema.decay=0.999, or ema.warmup_steps=0",
        ),
        (("ema.decay=0.5", "ema.warmup_steps=3"), "ema.warmup_steps=3 has no effect: the decay of its first step"),
        (("ema.decay=0.9", "parallel=local_sgd"), "ema.decay=0.9: under parallel=local_sgd no rank has the weights"),
    ],
)
def test_what_has_no_effect_or_does_not_fit_is_refused(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(InputError) as caught:
        config, request = configure("model=toy", *DATA, *words)
        build(config, request.choices, World(RankInfo(0, 0, 2, 2), None, Backend()))
    assert str(caught.value).startswith(message)
