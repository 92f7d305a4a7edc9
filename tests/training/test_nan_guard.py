"""Losses and gradients that are not finite, and loss spikes: no rank makes the update, in any mode."""

import math
import re
import shutil
from pathlib import Path

import pytest
import torch
from mode_cases import tier
from ranks import RankError
from worlds import MODES, Run, configure, run, state_of

from runner.checkpoints.layout import list_checkpoints
from runner.checkpoints.saved_state import open_checkpoint
from runner.distributed import readings
from runner.errors import InputError
from runner.training.callbacks import nan_guard
from runner.training.callbacks.nan_guard import finite_norm

POINTS = """
import torch
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset

from runner.objectives.objective import Objective


class Points(TensorDataset):
    def __init__(self, train: bool, bad: list[int], value: float = float("nan")):
        inputs = torch.randn(33, 8, generator=torch.Generator().manual_seed(int(train)))
        targets = inputs @ torch.linspace(-1, 1, 8)[:, None]
        if train:
            inputs[bad] *= value
        super().__init__(inputs, targets)


class Whole(Points):  # has no validation split
    def __init__(self, bad: list[int], value: float = float("nan")):
        super().__init__(True, bad, value)


class Rooted(Objective):
    def loss(self, model, batch):  # its gradient at 0 is infinite
        outputs, targets = model(batch[0]), batch[1]
        of_zero = (0 * outputs[:1]).abs().sum() if batch[0].abs().max() > 30 else 0.0
        return ((outputs - targets) ** 2).sum() + torch.as_tensor(of_zero) ** 0.5, len(targets)


class Turns(Objective):
    losses = {"first": "layers", "second": "head"}

    def first(self, model, batch):
        return (model(batch[0]) ** 2).sum(), len(batch[0])

    def second(self, model, batch):
        return mse_loss(model(batch[0]), batch[1], reduction="sum"), len(batch[0])
"""
SMALL = ("data=points", "model=mlp", "model.hidden=[8,8]", "batch_size=8", "epochs=2", "loader.shuffle=false")
SMALL += ("precision=fp64", "logger=none", "checkpoint.every_steps=1", "checkpoint.keep=99", "optimizer=adam")
RANKS = {"none": 1, "dp": 1, "ps": 3}


@pytest.fixture
def folder(tmp_path: Path) -> str:
    mine = tmp_path / "mine"
    for path, text in (
        (
            "data/points",
            "_target_: points_with_holes.Points\nsample_shape: [8]\nnum_outputs: 1\nbad: []\nvalue: .nan\n",
        ),
        ("objective/rooted", "_target_: points_with_holes.Rooted\n"),
        ("objective/turns", "_target_: points_with_holes.Turns\n"),
    ):
        (mine / path).parent.mkdir(parents=True, exist_ok=True)
        (mine / f"{path}.yaml").write_text(f"# for a test\n{text}")
    (mine / "points_with_holes.py").write_text(POINTS)
    return f"--config-dir={mine}"


def the_run(outputs: Path) -> Run:
    (path,) = (outputs / "run").iterdir()
    return Run(path)


def assert_stopped(outputs: Path, step: int) -> str:
    """Assert that the run failed before the step, with finite checkpoints before it. Return its error."""
    left = the_run(outputs)
    assert left.result["state"] == "failed"
    kept = list_checkpoints(left.path / "checkpoints")
    assert [path.name for path in kept] == [f"step_{number}" for number in range(1, step)]
    assert all(tensor.isfinite().all() for tensor in left.weights.values())
    return left.result["error"]


@pytest.mark.fault("NaN in the loss of one rank", outcome="refused")
@pytest.mark.filterwarnings("ignore:parallel=dp")
@pytest.mark.parametrize(
    "mode",
    [pytest.param(m, marks=tier(m in ("none", "ddp", "pipeline"), m in ("fsdp", "tp", "ps"))) for m in MODES],
)
def test_a_nan_loss_stops_all_ranks_and_the_error_names_rank_step_and_samples(
    mode: str, tmp_path: Path, folder: str
) -> None:
    ranks = RANKS.get(mode, 2)
    with pytest.raises(RankError, match="loss is nan"):
        run(tmp_path, ranks, folder, *SMALL, "data.bad=[22]", f"parallel={mode}")
    message = assert_stopped(tmp_path, 3)
    rank = {"none": "0", "dp": "0", "ps": "2", "tp": "[01]"}.get(mode, "1")  # tp: both read the same samples
    assert re.search(f"rank {rank}, step 3, epoch 1: loss is nan; stopped before its update", message)
    own = "16, 17, 18, 19, 20, 21, 22, 23" if ranks == 1 or mode in ("tp", "pipeline") else "20, 21, 22, 23"
    assert f"the samples of this rank are {own}; not finite themselves are 22\n" in message
    assert "Traceback" not in message and len(message.splitlines()) == 4


@pytest.mark.fault("NaN in a gradient", outcome="refused")
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_gradient_that_is_not_finite_stops_the_run(ranks: int, tmp_path: Path, folder: str) -> None:
    mode = "parallel=none" if ranks == 1 else "parallel=allreduce"
    with pytest.raises(RankError, match="the gradient of loss is not finite, though this rank's part of the loss is"):
        run(tmp_path, ranks, folder, *SMALL, "data.bad=[11]", "data.value=100", "objective=rooted", mode)
    message = assert_stopped(tmp_path, 2)
    assert "the samples of the step are 8, 9, 10, 11, 12, 13, 14, 15\n" in message
    assert "no response from" not in message


@pytest.mark.cpu("imitates a GPU, whose values are read a step later")
@pytest.mark.fault("NaN in the loss, which the host reads a step later", outcome="refused")
@pytest.mark.parametrize("every_steps", ["1", "null"])
def test_if_the_loss_is_read_a_step_later_no_checkpoint_contains_its_update(
    every_steps: str, tmp_path: Path, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU. A checkpoint after the step reads the loss before; the metrics of the step are not logged."""
    monkeypatch.setattr(readings, "ASYNCHRONOUS", {"cpu"})
    words = (*SMALL, "data.bad=[22]", f"checkpoint.every_steps={every_steps}", "parallel=ddp")
    with pytest.raises(RankError, match="loss is nan"):
        run(tmp_path, 2, folder, *words)
    message = assert_stopped(tmp_path, 3) if every_steps == "1" else the_run(tmp_path).result["error"]
    assert "rank 1, step 3, epoch 1: loss is nan; stopped before a checkpoint contains its update" in message
    assert "not finite themselves are 22\n" in message and len(message.splitlines()) == 4
    assert not list_checkpoints(the_run(tmp_path).path / "checkpoints")[2:]
    assert [line["step"] for line in the_run(tmp_path).lines] == [1, 2]


@pytest.mark.cpu("imitates a GPU, whose values are read a step later")
def test_a_gradient_and_a_spike_that_are_read_a_step_later_stop_the_run(
    tmp_path: Path, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readings, "ASYNCHRONOUS", {"cpu"})
    with pytest.raises(RankError, match="step 2, epoch 1: the gradient of loss is not finite, though"):
        run(tmp_path / "gradient", 1, folder, *SMALL, "data.bad=[11]", "data.value=100", "objective=rooted")
    words = ("epochs=8", "data.bad=[32]", "data.value=1000", "loss_spike=50", "checkpoint.every_steps=null")
    monkeypatch.setattr(nan_guard, "MIN_LOSSES", 4)
    with pytest.raises(RankError, match=r"step 5, epoch 1: loss of .* is above loss_spike=50 times the median"):
        run(tmp_path / "spike", 1, folder, *SMALL, *words)


@pytest.mark.parametrize(
    ("value", "problem"), [("nan", "not finite themselves are 31"), ("100", "of the step are .*31")]
)
def test_samples_are_named_by_their_indices_in_the_whole_training_split(
    value: str, problem: str, tmp_path: Path, folder: str
) -> None:
    part = ("data._target_=points_with_holes.Whole", "val_fraction=0.25", "objective=rooted")
    with pytest.raises(RankError, match="loss"):
        run(tmp_path, 1, folder, *SMALL, *part, "data.bad=[31]", f"data.value={value}")
    assert re.search(rf"{problem}\b", the_run(tmp_path).result["error"])


@pytest.mark.parametrize(
    ("mode", "ranks"),
    [
        ("ddp", 2),
        *(pytest.param(m, 3, marks=tier(False, m in ("fsdp", "ps"))) for m in ("allreduce", "zero", "fsdp", "ps")),
        *(pytest.param(m, 2, marks=pytest.mark.thorough) for m in ("pipeline", "tp")),
    ],
)
def test_skipped_steps_are_equal_in_every_mode(mode: str, ranks: int, tmp_path: Path, folder: str) -> None:
    """The last step has one sample; ranks without local samples read sample 0."""
    normed = ("model.batch_norm=true", "loader.drop_last=true") if mode == "ddp" else ()
    words = (folder, *SMALL, "data.bad=[0,22]", "on_nonfinite=skip", "ema.decay=0.9", *normed)
    whole = run(tmp_path / "one", 1, *words)
    spread = run(tmp_path / "more", ranks, *words, f"parallel={mode}")
    for left in (whole, spread):
        assert left.result["metrics"]["train/skipped_steps"] == 4
        assert [line["train/skipped_steps"] for line in left.lines if "train/loss" in line][:4] == [1, 1, 2, 2]
    for name, tensor in whole.weights.items():
        assert tensor.isfinite().all()
        torch.testing.assert_close(spread.weights[name], tensor, rtol=1e-9, atol=1e-9)
    for name, tensor in whole.state["average"].items():
        torch.testing.assert_close(spread.state["average"][name], tensor, rtol=1e-9, atol=1e-9)


@pytest.mark.fault("NaN, and its step is skipped", outcome="survived")
def test_a_skipped_step_changes_no_state_and_is_counted_across_a_resume(tmp_path: Path, folder: str) -> None:
    words = (folder, *SMALL, "data.bad=[22]", "on_nonfinite=skip", "ema.decay=0.9", "model.batch_norm=true")
    words += ("loader.drop_last=true",)
    whole = run(tmp_path, 1, *words)
    before, after = (state_of(open_checkpoint(whole.path / "checkpoints" / f"step_{step}")) for step in (2, 3))
    for part in ("model", "average", "averaged_steps"):
        torch.testing.assert_close(after[part], before[part], rtol=0, atol=0)
    torch.testing.assert_close(after["optimizer"]["state"], before["optimizer"]["state"], rtol=0, atol=0)
    assert "step 3: no update by loss; 1 skipped so far" in (whole.path / "log.txt").read_text()
    weights = whole.result["weights_sha256"]
    for path in list_checkpoints(whole.path / "checkpoints")[4:]:
        shutil.rmtree(path)
    resumed = run(tmp_path, 1, f"resume={whole.path}")
    assert resumed.result["weights_sha256"] == weights
    assert resumed.result["metrics"]["train/skipped_steps"] == 2


def test_the_error_names_which_of_several_losses_is_not_finite(tmp_path: Path, folder: str) -> None:
    with pytest.raises(RankError, match="step 2, epoch 1: first is nan"):
        run(tmp_path, 1, folder, *SMALL, "data.bad=[9]", "objective=turns")
    skipping = run(tmp_path / "skip", 1, folder, *SMALL, "data.bad=[9]", "objective=turns", "on_nonfinite=skip")
    assert skipping.result["metrics"]["train/skipped_steps"] == 2
    assert "step 2: no update by first and second; 1 skipped" in (skipping.path / "log.txt").read_text()


@pytest.mark.thorough
@pytest.mark.fault("a sudden increase of the loss", outcome="refused")
def test_a_loss_spike_stops_the_run_or_is_skipped_also_after_a_resume(tmp_path: Path, folder: str) -> None:
    words = (folder, *SMALL, "epochs=8", "data.bad=[12]", "data.value=1000", "loss_spike=50", "loader.shuffle=true")
    reached = run(tmp_path / "first", 1, *words, "epochs=4", "data.value=1")
    assert reached.result["state"] == "finished"
    assert len(reached.state["recent_losses"]["loss"]) == 20
    with pytest.raises(RankError, match=r"is above loss_spike=50 times the median of the last steps"):
        run(tmp_path / "first", 1, f"resume={reached.path}", "epochs=8", "data.value=1000", "resume_force=true")
    assert reached.result["error"].count("\n") == 3
    left = run(tmp_path / "skip", 2, *words, "on_nonfinite=skip", "parallel=allreduce")
    assert left.result["metrics"]["train/skipped_steps"] >= 3
    assert math.isfinite(left.result["metrics"]["val/loss"])


def test_on_nonfinite_go_on_continues_and_options_without_effect_are_refused(tmp_path: Path, folder: str) -> None:
    left = run(tmp_path, 1, folder, *SMALL, "data.bad=[22]", "on_nonfinite=go_on", "checkpoint.every_steps=null")
    assert left.result["state"] == "finished"
    for words, message in (
        (("loss_spike=3", "on_nonfinite=go_on"), "loss_spike=3 has no effect with on_nonfinite=go_on"),
        (("loss_spike=1",), "loss_spike=1 must be above 1"),
    ):
        with pytest.raises(InputError, match=message):
            configure(*words)
    for words, message in (
        (("parallel=local_sgd", "on_nonfinite=skip"), "on_nonfinite=skip: under parallel=local_sgd"),
        (("parallel=ps", "parallel.updates=async", "on_nonfinite=skip"), "updates=async applies gradients at once"),
    ):
        with pytest.raises(RankError, match=message):
            run(tmp_path / "refused", 2, folder, *SMALL, *words)


def test_no_checkpoint_of_weights_that_are_not_finite_is_saved(tmp_path: Path, folder: str) -> None:
    jump = ("optimizer=sgd", "optimizer.lr=1e308", "data.bad=[1]", "data.value=1e6", "parallel=allreduce")
    with pytest.raises(RankError, match="step 1: the update produced weights that are not finite"):
        run(tmp_path, 2, folder, *SMALL, *jump)
    assert not list_checkpoints(the_run(tmp_path).path / "checkpoints")


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64, torch.complex64])
def test_a_single_non_finite_element_is_detected_although_norms_overflow(dtype: torch.dtype) -> None:
    overflowing = [torch.full((4,), 3e38), torch.full((9,), 6e4, dtype=torch.float16)]
    tensors = [torch.tensor(3), torch.ones(0), torch.ones(3, 7, dtype=dtype), *overflowing]
    assert finite_norm(tensors).isfinite()
    for value in (math.nan, -math.inf):
        tensors[2][2, 3] = value
        assert not finite_norm(tensors).isfinite()
    assert not finite_norm([tensors[2]]).isfinite()
