"""ema.decay: torch's own average in every mode, evaluated instead of the weights, and restored exactly by a resume."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from parity import COMMON, assert_equal
from ranks import RankError
from torch import nn
from torch.optim.swa_utils import AveragedModel
from worlds import Run, build_experiment, run

from runner.checkpoints.layout import list_checkpoints
from runner.errors import InputError, Preempted
from runner.training import trainer
from runner.training.evaluation import evaluate

EMA = ("ema.decay=0.8", "ema.warmup_steps=4")
DATA = ("data=toy", "data.num_train=350", "batch_size=90", *COMMON)
# Evaluations between the steps: the next step must not use parameters that were gathered of the average.
OFTEN = ("eval_every_steps=3", "checkpoint.every_steps=3")
MIXED = ("model=linear", "model._target_=test_special_parameters.Mixed", "micro_batches=2", *DATA, *OFTEN, *EMA)
TOY = ("model=toy", *DATA, *OFTEN, *EMA)
OWN = f"--config-dir={Path(__file__).parent / 'own'}"
TWO_LOSSES = (OWN, "model=codes", "data=figures", "objective=adversarial", *COMMON, "batch_size=14", *OFTEN, *EMA)


def test_one_process_equals_a_loop_with_torchs_averaged_model(one_process: Callable[..., Run]) -> None:
    """AveragedModel starts with the weights at its first update, and copies the model's buffers."""
    overrides = ("model=mlp", "model.batch_norm=true", "data.sample_shape=[1,8,8]", "batch_size=350", *COMMON, *EMA)
    made = one_process(*overrides)
    experiment = build_experiment(*overrides)
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
    assert averaged.n_averaged == 11  # the first update and ten steps
    for name, parameter in averaged.module.named_parameters():
        torch.testing.assert_close(made.state["average"][name], parameter.detach(), rtol=1e-12, atol=1e-12)
    assert made.state["averaged_steps"] == 10
    assert not made.state["average"].keys() & dict(module.named_buffers()).keys()

    averaged.eval()
    batches = [batch.micro_batches[0].data for batch in experiment.val_loader.steps(0)]
    inputs, targets = (torch.cat(parts) for parts in zip(*batches, strict=True))
    expected = nn.functional.cross_entropy(averaged(inputs), targets).item()
    assert made.result["metrics"]["val/loss"] == pytest.approx(expected, rel=1e-12)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("overrides", "mode", "options"),
    [
        (TOY, "ps", ("parallel.updates=async", "parallel.forward=remote")),
        (TWO_LOSSES, "fsdp", ("parallel.meta_init=false", "parallel.reshard_after_forward=false")),
    ],
    ids=["async", "two losses"],
)
def test_average_equals_one_process(
    overrides: tuple[str, ...], mode: str, options: tuple[str, ...], one_process: Callable[..., Run], tmp_path: Path
) -> None:
    """`test_special_parameters.py` compares the average in all modes."""
    expected = one_process(*overrides)
    made = run(tmp_path, 2, *overrides, f"parallel={mode}", *options)
    assert_equal(made, expected)
    assert made.state["average"].keys() == expected.state["average"].keys()
    for name, tensor in expected.state["average"].items():
        torch.testing.assert_close(made.state["average"][name], tensor, rtol=0, atol=1e-9)
        assert not torch.allclose(tensor, expected.weights[name], atol=1e-6)


@pytest.mark.thorough
def test_a_resumed_run_ends_at_the_same_average_to_the_bit(tmp_path: Path) -> None:
    """In another mode, the values are equal up to rounding. An evaluation of the checkpoint equals that of the run."""
    whole = run(tmp_path, 2, *MIXED, "precision=fp32", "parallel=fsdp", "max_steps=7")
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
    for path in list_checkpoints(cut / "checkpoints")[:0:-1]:
        shutil.rmtree(path)
    shutil.copytree(cut, tmp_path / "other", symlinks=True)
    resumed = run(tmp_path, 2, f"resume={cut}")
    assert resumed.losses == losses
    assert resumed.result["metrics"] == whole.result["metrics"]
    for part in ("model", "average"):
        assert all(torch.equal(resumed.state[part][name], tensor) for name, tensor in expected[part].items()), part
    other = run(tmp_path, 1, f"resume={tmp_path / 'other'}", "parallel=none")
    for name, tensor in expected["average"].items():
        torch.testing.assert_close(other.state["average"][name], tensor, rtol=1e-4, atol=1e-5)


def test_it_can_be_turned_on_and_off_on_resume(tmp_path: Path) -> None:
    off = ("ema.decay=null", "ema.warmup_steps=0")
    part = run(tmp_path, 1, *TOY, *off, "max_steps=3")
    start = part.weights
    resume = (f"resume={part.path}",)
    run(tmp_path, 1, *resume, "ema.decay=0.8", "max_steps=4")
    now, average = part.weights, part.state["average"]
    assert average.keys() == start.keys()
    for name, tensor in start.items():
        torch.testing.assert_close(average[name], 0.8 * tensor + 0.2 * now[name])
    assert part.state["averaged_steps"] == 1
    log = (part.path / "log.txt").read_text()
    assert "ema.decay=0.8: the checkpoint has no average; it starts with the weights" in log
    run(tmp_path, 1, *resume, *off, "max_steps=5")
    assert "average" not in part.state


def test_a_run_stopped_during_an_evaluation_saves_the_weights_not_the_average(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    overrides = (*TOY, "checkpoint.every_steps=null")  # so that the first one is saved after the signal
    whole = run(tmp_path / "whole", 1, *overrides)

    def stopped(*args: object) -> dict[str, float]:
        evaluate(*args)  # type: ignore[arg-type]
        raise Preempted("a signal")

    monkeypatch.setattr(trainer, "evaluate", stopped)
    with pytest.raises(RankError, match="Preempted"):
        run(tmp_path / "cut", 1, *overrides)
    monkeypatch.undo()
    (path,) = (tmp_path / "cut" / "run").iterdir()
    assert "saved after step 3" in (path / "log.txt").read_text()
    resumed = run(tmp_path / "cut", 1, f"resume={path}")
    assert resumed.result["weights_sha256"] == whole.result["weights_sha256"]
    assert all(torch.equal(resumed.state["average"][name], tensor) for name, tensor in whole.state["average"].items())


def test_invalid_options_are_refused() -> None:
    for overrides, message in (
        (("ema.decay=1",), "ema.decay=1 must be above 0 and below 1, or null; try 0.999"),
        (("ema.warmup_steps=10",), "ema.warmup_steps=10 has no effect without ema.decay; add ema.decay=0.999"),
        (("ema.decay=0.9", "parallel=local_sgd"), "ema.decay=0.9: under parallel=local_sgd the ranks do not"),
    ):
        with pytest.raises(InputError, match=f"^{message}"):
            build_experiment("model=toy", *DATA, *overrides, world_size=2)
