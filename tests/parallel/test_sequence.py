"""parallel.sequence: ranks that compute different positions of the same samples give the numbers of one process."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from mode_cases import mesh
from parity import assert_equal
from ranks import RankError
from test_mesh import DROPOUT, GPT, OFTEN
from torch import nn
from worlds import Run, build_experiment, run

import models.gpt
from models.blocks import Block
from runner.errors import InputError
from runner.parallel.mesh import Mesh
from runner.training.mode import Axes
from runner.training.model.positions import LocalAttention

# The ranks have different numbers of positions, and targets are ignored in most of the last ones.
LONG = ("data.sample_shape=[11]", "max_steps=5")
GPU = (pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))
SPLIT = ("micro_batches=2", "activation_checkpointing=full")


@pytest.mark.parametrize(
    ("axes", "experiment"),
    [
        ("shard=1 sequence=2", (*DROPOUT, *LONG, *SPLIT)),
        ("shard=2 sequence=2", (*DROPOUT, *LONG, *SPLIT)),
        pytest.param("shard=1 sequence=4", (*DROPOUT, *LONG), marks=pytest.mark.thorough),
        pytest.param("shard=1 sequence=2", (*GPT, *LONG, "model.tied=false"), marks=pytest.mark.thorough),
        pytest.param("shard=1 sequence=2 replicate=2", (*GPT, *OFTEN, *LONG), marks=pytest.mark.thorough),
        pytest.param("shard=2 sequence=2 replicate=2", (*GPT, *OFTEN, *LONG), marks=pytest.mark.soak),
    ],
)
def test_parts_of_sequences_equal_one_process(
    axes: str, experiment: tuple[str, ...], one_process: Callable[..., Run], tmp_path: Path
) -> None:
    size, overrides = mesh(axes)
    assert_equal(run(tmp_path, size, *experiment, *overrides), one_process(*experiment))


def test_a_checkpoint_moves_to_other_meshes(one_process: Callable[..., Run], tmp_path: Path) -> None:
    overrides = (*DROPOUT, *LONG, "optimizer=adamw", "optimizer.eps=0.01")
    made = run(tmp_path, 4, *overrides, *mesh("shard=2 sequence=2")[1], "max_steps=2")
    run(tmp_path, 1, f"resume={made.path}", "parallel=none", "max_steps=3")
    run(tmp_path, 2, f"resume={made.path}", *mesh("shard=1 sequence=2")[1], "max_steps=5")
    assert_equal(made, one_process(*overrides))


def test_the_ranks_of_a_sample_are_neighbors() -> None:
    axes = Mesh(replicate=2, sequence=2).axes(8)
    assert axes == Axes(replicate=2, shard=2, sequence=2)
    assert [axes.data_rank(rank) for rank in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert [axes.reads_first(rank) for rank in range(3)] == [True, False, True]
    assert all(axes.counts(rank) for rank in range(8))  # each has the outputs of other positions


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("parallel.stage=2",), "parallel.sequence=2 cannot be combined with parallel.stage=2"),
        (("compile=true",), "compile=true has no effect with parallel.sequence=2, which calls stages()"),
        (("model=unet", "data=shapes"), "parallel.sequence=2 needs a model that offers its stages(); try model=gpt"),
        (("model=transformer", "data=digits"), "outputs and targets must have one value or row per position"),
        ((*GPT, "data.sample_shape=[3]"), "parallel.sequence=2 needs samples of at least 4 positions, not 3"),
        (
            (*GPT, "model._target_=test_sequence.Centered"),
            "model=gpt computes other values for a part of the positions",
        ),
        ((*GPT, "model._target_=test_sequence.Dropping"), "feature_dropout draws [1, 8, 1] numbers of a sample, which"),
        ((*GPT, "model._target_=test_sequence.Random"), "poisson draws the numbers of a sample in order"),
        ((*GPT, "+metrics.all_right._target_=test_sequence.AllRight"), "metrics.all_right is not computed from sums"),
        ((*GPT, "loss._target_=test_sequence.SquaredLoss"), "parallel.sequence=2 needs a loss that is a mean over"),
        ((*GPT, "+metrics.sentences._target_=test_sequence.Sentences"), "metrics.sentences is not computed from sums"),
        ((*GPT, "loss._target_=test_sequence.LossOfSamples"), "parallel.sequence=2 needs a loss that is a mean over"),
    ],
)
def test_unsupported_experiments_are_refused(options: tuple[str, ...], message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        build_experiment(*options, *mesh("shard=1 sequence=2")[1], world_size=2 if "stage" not in options[0] else 4)


@pytest.mark.parametrize("axes", ["shard=1 sequence=2", "shard=2 sequence=2"])
@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("Local", "computes other values for a part of the positions"),
        ("Rotary", "computes other values for a part of the positions"),
        ("Encoder", "computes other values for a part of the positions"),
        ("Prefix", "parallel.sequence does not support attention of 6 queries to 8 keys in a part of 6 positions"),
    ],
)
def test_models_that_mix_positions_otherwise_are_refused(axes: str, model: str, message: str) -> None:
    """With shard, the model is on the meta device; initial weights may hide other positions, as in `Local`."""
    size, overrides = mesh(axes)
    with pytest.raises(InputError, match=re.escape(message)):
        build_experiment(*GPT, f"model._target_=test_sequence.{model}", *overrides, world_size=size)


def test_a_stage_that_is_recomputed_gets_its_first_position(one_process: Callable[..., Run], tmp_path: Path) -> None:
    overrides = (*GPT, *LONG, *SPLIT, "model._target_=test_sequence.RotaryStages")
    assert_equal(run(tmp_path, 2, *overrides, *mesh("shard=1 sequence=2")[1]), one_process(*overrides))


def test_a_batch_with_too_few_positions_is_one_message(tmp_path: Path) -> None:
    """The dry run has seen longer samples."""
    words = (*GPT, *LONG, "data._target_=test_sequence.Shortening", *mesh("shard=1 sequence=2")[1])
    with pytest.raises(
        RankError, match=r"InputError: parallel.sequence=2 needs samples of at least 4 positions, not 3"
    ):
        run(tmp_path, 2, *words, "loader.shuffle=false")


def test_predictions_need_whole_samples(tmp_path: Path) -> None:
    made = run(tmp_path, 1, *GPT, *LONG, "max_steps=1")
    words = ("task=predict", f"run={made.path}", "predict.format=jsonl", "parallel=mesh", "parallel.sequence=null")
    run(tmp_path / "whole", 2, *words, "parallel.shard=2")
    with pytest.raises(
        RankError, match=r"InputError: task=predict does not support parallel.sequence=2, which splits the outp"
    ):
        run(tmp_path / "parts", 2, *words, "parallel.shard=1")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", [2, 4])
def test_the_last_positions_attend_to_all_keys(heads: int, dtype: torch.dtype, device: str) -> None:
    """With two heads of keys and values, pairs of heads of queries share them."""
    whole = [torch.randn(3, n, 64, 32, device=device, dtype=dtype, requires_grad=True) for n in (4, heads, heads)]
    options = {"is_causal": True, "enable_gqa": heads == 2}
    expected = F.scaled_dot_product_attention(*whole, **options)[..., 40:, :]
    with (attention := LocalAttention(lambda local: torch.cat(whole[1:], -1))):
        attention.positions = range(40, 64)
        found = F.scaled_dot_product_attention(*(tensor[..., 40:, :] for tensor in whole), **options)
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if dtype == torch.bfloat16 else {}
    torch.testing.assert_close(found, expected, **tolerance)
    gradients = [torch.autograd.grad(output.square().sum(), whole) for output in (found, expected)]
    torch.testing.assert_close(*gradients, **tolerance)


class Shortening(torch.utils.data.Dataset):
    """Sentences of 11 tokens, and after the first 14 of three tokens."""

    def __init__(self, train: bool, sample_shape: list[int], num_outputs: int, num_samples: int) -> None:
        self.tokens = torch.arange(num_samples * 12).view(num_samples, 12) % num_outputs

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        length = 11 if index < 14 else 3
        return self.tokens[index, :length], self.tokens[index, 1 : length + 1]

    def collate(self, samples: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, targets = zip(*samples, strict=True)
        return torch.stack(inputs), torch.stack(targets)


class Centered(models.gpt.GPT):
    """A model whose head subtracts the mean over all positions."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.norm = Difference()


class Difference(nn.Module):
    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return features - features.mean(1, keepdim=True)


class Dropping(models.gpt.GPT):
    """A model that drops whole features of a sample."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.blocks[0].dropout = Channels()


class Channels(nn.Module):
    def forward(self, features: torch.Tensor) -> torch.Tensor:  # (N, T, dim)
        return F.dropout1d(features.transpose(1, 2), 0.2, self.training).transpose(1, 2)


class Sentences:
    """The fraction of sentences whose tokens are all predicted."""

    higher_is_better = True

    def update(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        hits = (outputs.argmax(-1) == targets).all(1)
        return torch.stack([hits.sum(), hits.new_tensor(len(hits), dtype=torch.int64)])

    def compute(self, sums: torch.Tensor) -> torch.Tensor:
        return sums[0] / sums[1]


class LossOfSamples(nn.Module):
    """A mean over samples of the square of their mean."""

    def forward(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return outputs.mean((1, 2)).square().mean()


class SquaredLoss(nn.Module):
    """The square of a mean over the positions, which is equal for all of them before training."""

    def forward(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(outputs.movedim(-1, 1), targets, reduction="none").mean(1).square().mean()

    def weight_of(self, targets: torch.Tensor) -> int:
        return targets.numel()


class AllRight(Sentences):
    """The sentences whose tokens are all predicted, per token."""

    def update(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        hits = (outputs.argmax(-1) == targets).all(1)
        return torch.stack([hits.sum(), hits.new_tensor(targets.numel(), dtype=torch.int64)])


class WithAttention(models.gpt.GPT):
    """A model with another attention."""

    attention: type[nn.Module]

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        for block in self.blocks:
            block.attention = self.attention(block.attention)


class Projected(nn.Module):
    """The layers of an attention of gpt."""

    def __init__(self, attention: Any) -> None:
        super().__init__()
        self.head_dim, self.proj = attention.head_dim, attention.proj
        self.query, self.key, self.value = attention.query, attention.key, attention.value

    def heads(self, features: torch.Tensor) -> list[torch.Tensor]:
        layers = (self.query, self.key, self.value)
        return [layer(features).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for layer in layers]

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.proj(self.attend(*self.heads(features)).transpose(1, 2).flatten(2))


class MatrixAttention(Projected):
    """Attention by matrix products, whose last layer is zero."""

    def __init__(self, attention: Any) -> None:
        super().__init__(attention)
        nn.init.zeros_(self.proj.weight)

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        later = torch.ones(key.size(-2), key.size(-2), dtype=torch.bool, device=key.device).triu(1)
        return (query @ key.mT).masked_fill(later, -torch.inf).softmax(-1) @ value


class RotaryAttention(Projected):
    first_position = 0

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(self.first_position, self.first_position + key.size(-2), device=key.device)
        angles = positions[:, None].to(key.dtype) * torch.ones(self.head_dim // 2, dtype=key.dtype, device=key.device)

        def rotate(features: torch.Tensor) -> torch.Tensor:
            one, other = features.chunk(2, -1)
            cos, sin = angles.cos(), angles.sin()
            return torch.cat([one * cos - other * sin, one * sin + other * cos], -1)

        return F.scaled_dot_product_attention(rotate(query), rotate(key), value, is_causal=True)


class PrefixAttention(Projected):
    """Attention to two more keys."""

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(query, F.pad(key, (0, 0, 2, 0)), F.pad(value, (0, 0, 2, 0)))


class OfTorch(nn.Module):
    """nn.MultiheadAttention, inside of which torch hides the attention from function modes."""

    def __init__(self, attention: Any) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(attention.proj.out_features, 2, batch_first=True)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.attention(features, features, features, need_weights=False)[0]


class Local(WithAttention):
    attention = MatrixAttention


class Rotary(WithAttention):
    attention = RotaryAttention


class Prefix(WithAttention):
    attention = PrefixAttention


class Encoder(WithAttention):
    attention = OfTorch


class RotaryStages(Rotary):
    """The rotary positions of a stage begin at its first position."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        for block in self.blocks:
            block.__class__ = RotaryBlock


class RotaryBlock(Block):
    def forward(self, features: torch.Tensor, first_position: int = 0) -> torch.Tensor:
        self.attention.first_position = first_position
        try:
            return super().forward(features)
        finally:
            self.attention.first_position = 0


class Random(models.gpt.GPT):
    """A model that draws from a Poisson distribution."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.blocks[0].dropout = Poisson()


class Poisson(nn.Module):
    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return features + torch.poisson(torch.ones_like(features)) if self.training else features
