"""Steps that are captured in CUDA graphs: they give the numbers of the ordinary run to the bit.

CUDA graphs are imagined on the CPU (imagined_graphs.py). tests/commands/test_gpu.py has tests on a GPU.
"""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from imagined_graphs import NUM_CAPTURES, NUM_REPLAYS, imagine_graphs
from ranks import RankError
from torch import Tensor, nn
from worlds import Run, run

from runner.training.callbacks.contract import Callback, Progress

# 22 steps of 64 samples are an epoch, and one of 29 samples its last step.
MLP = ("model=mlp", "model.hidden=[16]", "data.sample_shape=[1,8,8]", "batch_size=64", "logger=none", "max_steps=30")
BY_EPOCHS = ("scheduler=step", "scheduler.every_epochs=1", "scheduler.gamma=0.3")
NORMED = (*MLP, "model.dropout=0.3", "model.batch_norm=true")
CONVNET = ("model=convnet", "model.channels=[4,8]", "data.sample_shape=[1,8,8]", "logger=none", "max_steps=9")
CODES = f"--config-dir={Path(__file__).parent / 'own'}"
GPT = (CODES, "model=gpt", "model.dim=8", "model.depth=2", "model.heads=2", "model.dropout=0.1", "data=sentences")
GPT += ("logger=none", "max_steps=9")
# By name: the overrides, and the number of graphs and of their replays.
EXPERIMENTS: dict[str, tuple[Sequence[str], int, int]] = {
    "momentum": ((*NORMED, "optimizer.momentum=0.9", "clip_grad_norm=0.5", "log_every=3"), 2, 49),
    "adam": ((*NORMED, "optimizer=adam", "optimizer.lr=0.01", "on_nonfinite=skip", *BY_EPOCHS), 3, 46),
    "schedule": ((*MLP, "optimizer=adamw", "optimizer.lr=0.01", "scheduler=cosine", "scheduler.warmup_steps=4"), 1, 26),
    "accumulation": ((*NORMED, "micro_batches=3", "ema.decay=0.9", "eval_every_steps=3", "loss_spike=10"), 2, 49),
    "convnet": ((*CONVNET, "precision=bf16", "optimizer=adam", "optimizer.fused=false"), 1, 6),
    "gpt": ((*GPT, "data.num_samples=300", "batch_size=14", "optimizer=adam"), 2, 9),
    "weights": ((*CONVNET, "loss=cross_entropy", "+loss.ignore_index=3", "optimizer.momentum=0.9"), 2, 9),
}


@pytest.fixture(autouse=True)
def graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    imagine_graphs(monkeypatch)


def assert_same(run: Run, other: Run) -> None:
    assert run.losses == other.losses and run.grad_norms == other.grad_norms
    assert run.values("val/loss") == other.values("val/loss")
    for name, weights in run.weights.items():
        assert torch.equal(weights, other.weights[name]), name


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_captured_steps_give_the_numbers_of_the_ordinary_run(name: str, tmp_path: Path) -> None:
    words, num_graphs, num_replays = EXPERIMENTS[name]
    expected = run(tmp_path / "ordinary", 1, *words)
    assert_same(run(tmp_path / "captured", 1, *words, "cuda_graph=true"), expected)
    assert (NUM_CAPTURES.value, NUM_REPLAYS.value) == (num_graphs, num_replays)


def test_a_resumed_run_is_captured_again_and_equal(tmp_path: Path) -> None:
    words = tuple(word for word in NORMED if not word.startswith("max_steps="))
    words += ("optimizer=adam", "optimizer.lr=0.01", "ema.decay=0.9", "eval_every_steps=12")
    expected = run(tmp_path / "ordinary", 1, *words, "max_steps=30")
    part = run(tmp_path / "captured", 1, *words, "max_steps=12", "cuda_graph=true")
    assert len(part.losses) == 12
    assert_same(run(tmp_path / "captured", 1, f"resume={part.path}", "max_steps=30"), expected)
    assert NUM_CAPTURES.value == 4


class Changing(Callback):
    """Changes what a graph depends on: the parameters that are trained, an attribute, and a buffer."""

    def on_start(self, run: Any) -> None:
        self.model = MODELS[-1]

    def after_step(self, now: Progress) -> None:
        if now.step == 8:
            self.model.first.requires_grad_(False)
        if now.step == 14:
            self.model.slope = 0.2
        if now.step == 20:
            self.model.scale = torch.full((1,), 0.5)


MODELS: list["Plain"] = []


class Plain(nn.Module):
    """Two layers; `fault` is what its forward does that a graph cannot repeat."""

    def __init__(self, sample_shape: list[int], num_outputs: int, fault: str = ""):
        super().__init__()
        self.first, self.last = nn.Linear(sample_shape[0], 8), nn.Linear(8, num_outputs)
        self.register_buffer("scale", torch.ones(1))
        self.slope, self.fault, self.count = 0.1, fault, 0
        MODELS.append(self)

    def forward(self, inputs: Tensor) -> Tensor:
        features = nn.functional.leaky_relu(self.first(inputs), self.slope) * self.scale
        if self.fault == "item" and features.sum().item() > 1e9:
            return self.last(-features)
        if self.fault == "late item" and len(inputs) > 2 and features.sum().item() > 1e9:  # not in dry runs
            return self.last(-features)
        if self.fault == "mask":
            features[features > 3] = 3.0
        if self.fault == "random" and random.random() < 0.5:
            features = 2 * features
        if self.fault == "count" and self.training:
            self.count += 1
        if self.fault == "share":
            features = features + torch.rand(8)
        if self.fault == "replace" and self.training:
            self.scale = self.scale * 1.01
        return self.last(features)


TOY = ("data=toy", "model=linear", "model._target_=test_captured.Plain", "batch_size=32", "logger=none", "max_steps=26")


def test_steps_are_captured_again_after_a_callback_has_changed_what_they_depend_on(tmp_path: Path) -> None:
    words = (*TOY, "data.num_train=320", "+callbacks.changing._target_=test_captured.Changing")
    expected = run(tmp_path / "ordinary", 1, *words)
    assert_same(run(tmp_path / "captured", 1, *words, "cuda_graph=true"), expected)
    assert (NUM_CAPTURES.value, NUM_REPLAYS.value) == (5, 16)  # the changes leave few steps for updates


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("+model.fault=item",),
            r"aten._local_scalar_dense.default waits for .* \(at .*test_captured.py:\d+\); try cuda",
        ),
        (
            ("+model.fault=mask",),
            r"aten.index_put_.default waits for a value of the device \(at .*_captured.py:\d+\); try",
        ),
        (("+model.fault=count",), "forward changes the attribute count; try cuda_graph=false"),
        (("+model.fault=share",), "the model draws random numbers that all samples share"),
        (("parallel=allreduce",), "needs a mode whose steps do not communicate; try parallel=none"),
        (("replay_every_steps=2",), "replay_every_steps=2 does not work with cuda_graph=true"),
    ],
)
def test_what_a_graph_cannot_repeat_is_refused(words: Sequence[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(RankError, match=f"InputError: .*{message}"):
        run(tmp_path, 1, *TOY, *words, "cuda_graph=true")


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (
            "late item",
            r"a step cannot be captured .* waits for a value of the device \(at .*test_captured.py:\d+\); try",
        ),
        ("random", "the step draws random numbers on the CPU"),
    ],
)
def test_a_step_that_cannot_be_captured_fails_and_names_the_line(fault: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(RankError, match=f"JobFailed: .*\n?.*{message}"):
        run(tmp_path, 1, *TOY, f"+model.fault='{fault}'", "cuda_graph=true")


def test_steps_that_differ_are_not_captured_and_a_warning_names_the_reason(tmp_path: Path) -> None:
    words = (*TOY, "+model.fault=replace")
    expected = run(tmp_path / "ordinary", 1, *words)
    captured = run(tmp_path / "captured", 1, *words, "cuda_graph=true")
    assert_same(captured, expected)
    assert NUM_CAPTURES.value == 0
    warning = "no step was captured, because steps differ by the batch, a parameter, a buffer"
    assert warning in (captured.path / "log.txt").read_text()
