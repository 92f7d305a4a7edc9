"""The language model: shapes, causality, tied weights, initial weights, and refused input."""

import copy
import math

import pytest
import torch
from runner.shipped.models.blocks import Attention
from runner.shipped.models.gpt import GPT
from torch import nn

SIZES = {"dim": 16, "depth": 2, "heads": 4}


def make(tied: bool = True, **options) -> GPT:
    torch.manual_seed(1)
    return GPT([8], 11, **(SIZES | {"tied": tied} | options)).double()


def tokens(num: int = 3, length: int = 8) -> torch.Tensor:
    return torch.randint(11, (num, length), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize(("num", "length"), [(3, 8), (2, 1), (0, 8)])
def test_each_token_has_outputs_for_the_whole_vocabulary(num, length):
    model = make()
    outputs = model(tokens(num, length))
    assert outputs.shape == (num, length, 11)
    outputs.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_outputs_do_not_depend_on_later_tokens():
    model, inputs = make(), tokens()
    outputs = model(inputs)
    for place in range(8):
        others = inputs.clone()
        others[:, place] = (others[:, place] + 1) % 11
        changed = (model(others) != outputs).any(-1)  # (N, T)
        assert not changed[:, :place].any() and changed[:, place:].all()


@pytest.mark.parametrize("is_causal", [True, False])
def test_attention_equals_torchs_layer(is_causal):
    torch.manual_seed(1)
    attention = Attention(16, 4, is_causal=is_causal).double()
    layers = [attention.query, attention.key, attention.value]
    reference = nn.MultiheadAttention(16, 4, batch_first=True).double()
    with torch.no_grad():
        reference.in_proj_weight.copy_(torch.cat([layer.weight for layer in layers]))
        reference.in_proj_bias.copy_(torch.cat([layer.bias for layer in layers]))
    reference.out_proj = attention.proj
    features = torch.randn(2, 5, 16, dtype=torch.float64)
    later = torch.ones(5, 5, dtype=torch.bool).triu(1)
    expected = reference(features, features, features, attn_mask=later if is_causal else None)[0]
    torch.testing.assert_close(attention(features), expected, rtol=1e-12, atol=1e-12)


def test_tied_weights_are_one_parameter():
    model = make()
    assert model.head.weight is model.embed.weight
    names = [name for name, _ in model.named_parameters()]
    assert "embed.weight" in names and "head.weight" not in names
    assert {"embed.weight", "head.weight"} <= model.state_dict().keys()
    assert sum(p.numel() for p in make(tied=False).parameters()) == sum(p.numel() for p in model.parameters()) + 11 * 16
    clone = copy.deepcopy(model)
    assert clone.head.weight is clone.embed.weight is not model.embed.weight


def test_initial_weights_are_those_of_gpt_2():
    torch.manual_seed(3)
    model = GPT([64], 96, dim=128, depth=8)
    for name, parameter in model.named_parameters():
        if "norm" in name and name.endswith("weight"):
            assert (parameter == 1).all(), name
        elif name.endswith("bias"):
            assert (parameter == 0).all(), name
        else:
            added = name.endswith(("proj.weight", "down.weight"))
            expected = 0.02 / math.sqrt(16) if added else 0.02
            assert parameter.std().item() == pytest.approx(expected, rel=0.05), name
            assert abs(parameter.mean().item()) < expected / 10, name


@pytest.mark.parametrize(
    ("sample_shape", "options", "message"),
    [
        (
            (1, 8, 8),
            {},
            r"gpt needs samples that are sequences of tokens, but the samples have shape \(1, 8, 8\); choose",
        ),
        ((8,), {"heads": 3}, "heads=3 must divide dim=128; try heads=1, or dim=129"),
        ((8,), {"depth": 0}, "depth=0 must be at least 1"),
        ((8,), {"dropout": 1.0}, "dropout=1.0 must be at least 0 and below 1; try 0.1"),
    ],
)
def test_options_out_of_range_are_refused(sample_shape, options, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        GPT(sample_shape, 11, **options)


def test_unsuitable_tokens_are_refused():
    with pytest.raises(ValueError, match=r"^a sequence of 9 must have at most the 8 positions that were learned$"):
        make()(tokens(length=9))
    with pytest.raises(TypeError, match=r"^gpt needs tokens, which are integers, but got float64; choose a dataset of"):
        make()(tokens().double())
