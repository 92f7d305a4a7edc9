"""Models and objectives that draw random numbers give the numbers of one process in every mode, in float64."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from custom_models import Chain
from mode_cases import tier
from parity import assert_equal
from torch import Tensor, nn
from worlds import MODES, Run, run

from runner.objectives.objective import Objective

CUSTOM = f"--config-dir={Path(__file__).parent / 'own'}"
COMMON = (CUSTOM, "precision=fp64", "optimizer.lr=0.05", "epochs=9", "max_steps=5", "logger=none", "batch_size=14")


class Noise(nn.Module):
    """Drops samples, as stochastic depth does, and adds noise of each sample and noise that all samples share."""

    def forward(self, features: Tensor) -> Tensor:
        if self.training:
            features = features * features.new_empty(len(features), 1).bernoulli_(0.9) + torch.rand(8).to(features)
        return features + 0.1 * torch.randn_like(features)  # in evaluation, too


class Noisy(Chain):
    """Blocks with dropout between sharded layers, and noise after each block."""

    def __init__(self, sample_shape: Sequence[int], num_outputs: int):
        super().__init__(sample_shape, num_outputs, dropout=0.3)
        for number, block in enumerate(self.blocks):
            self.blocks[number] = nn.Sequential(block, Noise())

    def tensor_plan(self) -> dict[str, str]:
        styles = {"up": "colwise", "down": "rowwise"}
        return {f"blocks.{index}.0.{name}": style for index in range(4) for name, style in styles.items()}


class Variational(Objective):
    """The negative evidence lower bound of a variational autoencoder with a fixed variance."""

    def loss(self, model: Any, batch: Any) -> tuple[Tensor, int]:
        points = batch[0]["points"]
        codes = model.encoder(points)
        decoded = model.decoder(codes + 0.3 * torch.randn_like(codes))
        unused = 0 * model.critic(codes).sum()
        return ((decoded - points) ** 2).sum() + codes.square().sum() + unused, len(points)


CODES = ("model=codes", "data=figures")
EXPERIMENTS = {
    "noise": ("model=linear", "model._target_=test_random_numbers.Noisy", "data=toy", "data.num_train=33"),
    "gpt": ("model=gpt", "model.dim=8", "model.depth=2", "model.heads=2", "model.dropout=0.1", "data=sentences"),
    "net": ("model=net", "data.sample_shape=[1,16,16]", "transforms=none"),
    "norm": ("model=mlp", "model.batch_norm=true", "model.dropout=0.2", "micro_batches=1", "data.sample_shape=[1,8,8]"),
    "padded": (
        *("model=two_heads", "model._target_=drawing_models.Reader", "data=figures", "metrics=none"),
        *("data._target_=drawing_models.Ragged", "loss=cross_entropy", "loss.ignore_index=-100"),
    ),
    "between": ("model=linear", "model._target_=drawing_models.Between", "data=toy", "data.num_train=33"),
    "steps": (
        "model=linear",
        "model._target_=drawing_models.Between",
        "+model.steps=3",
        "data=toy",
        "data.num_train=33",
    ),
    "orders": ("model=linear", "model._target_=drawing_models.Orders", "data=toy", "data.num_train=33"),
    "vae": (*CODES, "objective=reconstruction", "objective._target_=test_random_numbers.Variational"),
}
SUPPORTED = {
    "vae": ("allreduce", "ddp", "fsdp", "none", "zero", "ps"),
    "padded": ("none", "ddp"),
    "between": ("tp",),
    "steps": ("tp",),
    "orders": ("none", "ddp"),
}
CELLS = [
    (name, mode, size, micro_batches)
    for name in EXPERIMENTS
    for mode in MODES
    for size, micro_batches in ([(1, 3)] if mode in ("none", "dp") else [(2, 3), (3 if mode == "ps" else 4, 1)])
    if mode in SUPPORTED.get(name, MODES)
]
DEFAULT = {
    *(("noise", "pipeline", 2), ("vae", "ddp", 2), ("net", "allreduce", 2), ("vae", "fsdp", 2)),
    *(("padded", "ddp", 2), ("between", "tp", 2), ("orders", "ddp", 2)),
}
THOROUGH = {  # the other modes
    *(("gpt", "tp", 2), ("norm", "fsdp", 4), ("vae", "none", 1), ("noise", "dp", 1)),
    *(("noise", mode, 2) for mode in ("zero", "ps", "local_sgd")),
    *(("padded", "none", 1), ("orders", "none", 1), ("steps", "tp", 2)),
}


@pytest.mark.filterwarnings("ignore:parallel=dp")
@pytest.mark.parametrize(
    ("name", "mode", "size", "micro_batches"),
    [
        pytest.param(*cell, id="-".join(map(str, cell)), marks=tier(cell[:3] in DEFAULT, cell[:3] in THOROUGH))
        for cell in CELLS
        if cell[0] in ("noise", "vae") or cell[:3] in DEFAULT | THOROUGH
    ],
)
def test_random_numbers_equal_those_of_one_process(
    name: str, mode: str, size: int, micro_batches: int, one_process: Callable[..., Run], tmp_path: Path
) -> None:
    overrides = (*COMMON, *EXPERIMENTS[name], f"parallel={mode}", f"micro_batches={micro_batches}")
    if mode == "local_sgd":
        overrides = (*overrides, "parallel.warmup_steps=100")
    if mode == "ps" and name == "noise":
        overrides = (*overrides, "parallel.forward=remote")
    assert_equal(run(tmp_path, size, *overrides), one_process(*COMMON, *EXPERIMENTS[name]))


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["between", "steps"])
def test_draws_between_the_sharded_layers_of_a_mesh(name: str, one_process: Callable[..., Run], tmp_path: Path) -> None:
    mesh = ("parallel=mesh", "parallel.replicate=2", "parallel.tensor=2")
    assert_equal(run(tmp_path, 4, *COMMON, *EXPERIMENTS[name], *mesh), one_process(*COMMON, *EXPERIMENTS[name]))


def test_draws_for_gradients(one_process: Callable[..., Run], tmp_path: Path) -> None:
    """They follow the samples, but a pipeline computes the gradients of each stage separately."""
    overrides = ("model=linear", "model._target_=fuzz_parts.Net", "+model.parts=[noisy_gradient,block]", "data=toy")
    made = run(tmp_path / "fsdp", 2, *COMMON, *overrides, "parallel=fsdp")
    assert_equal(made, one_process(*COMMON, *overrides))
    made = run(tmp_path / "pipeline", 1, *COMMON, *overrides, "parallel=pipeline")
    assert (
        "depend on the number of ranks, because hooks of its gradients draw them" in (made.path / "log.txt").read_text()
    )


def test_the_order_of_the_samples_is_found_without_weights(one_process: Callable[..., Run], tmp_path: Path) -> None:
    """The placeholders of weights that are created later must not make all features equal."""
    overrides = ("model=linear", "model._target_=fuzz_parts.Net", "+model.parts=[group_norm,transposed]", "data=toy")
    made = run(tmp_path, 2, *COMMON, *overrides, "parallel=fsdp")
    assert_equal(made, one_process(*COMMON, *overrides))


@pytest.mark.thorough
def test_resuming_on_other_numbers_of_ranks(one_process: Callable[..., Run], tmp_path: Path) -> None:
    recompute = "activation_checkpointing=full"
    made = run(tmp_path, 4, *COMMON, *EXPERIMENTS["noise"], "parallel=ddp", "max_steps=2", recompute)
    for size, steps in ((1, 4), (2, 5)):
        run(tmp_path, size, f"resume={made.path}", f"parallel={'none' if size == 1 else 'tp'}", f"max_steps={steps}")
    expected = one_process(*COMMON, *EXPERIMENTS["noise"])
    assert made.losses == pytest.approx(expected.losses, rel=1e-9)
    assert made.result["metrics"] == pytest.approx(expected.result["metrics"], rel=1e-9)
