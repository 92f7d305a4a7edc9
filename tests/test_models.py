"""The models: shapes, sizes, initial weights, what they refuse, and their configuration."""

import importlib
import inspect
import math
import pickle
from pathlib import Path

import pytest
import torch
import yaml
from torch import nn

from models.convnet import ConvNet
from models.linear import Linear
from models.mlp import MLP
from models.toy import Toy

CONF = Path(__file__).parents[1] / "conf" / "model"
MODELS = {"toy": Toy, "linear": Linear, "mlp": MLP, "convnet": ConvNet}


def num_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("kind", [Toy, Linear, MLP])
@pytest.mark.parametrize("sample_shape", [(10,), (1, 28, 28), (4, 3)])
def test_flattening_models_take_samples_of_any_shape(kind, sample_shape):
    model = kind(sample_shape=sample_shape, num_outputs=5)
    samples = torch.rand(3, *sample_shape)
    assert model(samples).shape == (3, 5)
    torch.testing.assert_close(model(samples), model(samples.flatten(1)))


@pytest.mark.parametrize("sample_shape", [(1, 28, 28), (3, 32, 32), (2, 4, 7), (1, 30, 29)])
def test_convnet_takes_images_of_any_size_from_4_x_4(sample_shape):
    model = ConvNet(sample_shape=sample_shape, num_outputs=10, channels=[4, 6])
    assert model(torch.rand(2, *sample_shape)).shape == (2, 10)


def test_sizes():
    assert num_parameters(Toy([10], 5)) == 10 * 10 + 10 + 10 * 5 + 5
    assert num_parameters(Linear([20], 1)) == 21
    assert num_parameters(MLP([1, 28, 28], 10)) == 784 * 256 + 256 + 256 * 128 + 128 + 128 * 10 + 10
    blocks = 1 * 16 * 25 + 16 + 2 * 16 + 16 * 32 * 25 + 32 + 2 * 32
    assert num_parameters(ConvNet([1, 28, 28], 10)) == blocks + 7 * 7 * 32 * 10 + 10


def test_toy_is_two_linear_layers_with_a_relu_between():
    model = Toy([10], 5)
    samples = torch.randn(4, 10)
    hidden = (samples @ model.hidden.weight.T + model.hidden.bias).clamp(min=0)
    torch.testing.assert_close(model(samples), hidden @ model.head.weight.T + model.head.bias)


def test_convnet_draws_its_weights_in_the_order_of_its_layers():
    torch.manual_seed(3)
    model = ConvNet([1, 28, 28], 10)
    torch.manual_seed(3)
    conv1, norm1 = nn.Conv2d(1, 16, 5, 1, 2), nn.BatchNorm2d(16)
    conv2, norm2 = nn.Conv2d(16, 32, 5, 1, 2), nn.BatchNorm2d(32)
    reference = nn.Sequential(
        *(conv1, norm1, nn.ReLU(), nn.MaxPool2d(2, 2)),
        *(conv2, norm2, nn.ReLU(), nn.MaxPool2d(2, 2)),
        *(nn.Flatten(), nn.Linear(32 * 7 * 7, 10)),
    )
    states = list(model.state_dict().values()), list(reference.state_dict().values())
    assert len(states[0]) == len(states[1]) == 16
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*states, strict=True))
    images = torch.rand(2, 1, 28, 28)
    assert torch.equal(model(images), reference(images))


def test_mlp_options_make_the_layers():
    model = MLP([6], 2, hidden=[5, 4, 3], batch_norm=True, dropout=0.5)
    kinds = [type(layer) for layer in model.layers]
    assert kinds == [nn.Linear, nn.BatchNorm1d, nn.ReLU, nn.Dropout] * 3
    assert [layer.out_features for layer in model.layers if isinstance(layer, nn.Linear)] == [5, 4, 3]
    assert [type(layer) for layer in MLP([6], 2, hidden=[5]).layers] == [nn.Linear, nn.ReLU]


def test_toy_and_linear_learn():
    torch.manual_seed(0)
    samples = torch.randn(256, 4)
    targets = samples @ torch.randn(4, 1)
    for model in (Linear([4], 1), Toy([4], 1)):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        before = nn.functional.mse_loss(model(samples), targets).item()
        for _ in range(100):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(samples), targets)
            loss.backward()
            optimizer.step()
        assert loss.item() < before / 10


@pytest.mark.parametrize("kind", MODELS.values())
def test_models_pickle(kind):
    model = kind([1, 8, 8], 3)
    copy = pickle.loads(pickle.dumps(model))
    samples = torch.rand(2, 1, 8, 8)
    assert torch.equal(copy.eval()(samples), model.eval()(samples))


@pytest.mark.parametrize("kind", MODELS.values())
@pytest.mark.parametrize(
    ("sample_shape", "num_outputs", "message"),
    [
        ((), 5, r"sample_shape=\[\] must be one or more sizes of at least 1"),
        ((1, 0, 8), 5, r"sample_shape=\[1, 0, 8\] must be"),
        ((1, 8, 8), 0, "num_outputs=0 must be at least 1"),
    ],
)
def test_empty_sizes_are_refused(kind, sample_shape, num_outputs, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        kind(sample_shape, num_outputs)


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (Toy, {"hidden": 0}, "hidden=0 must be at least 1; try 10"),
        (MLP, {"hidden": []}, r"hidden=\[\] must be one or more sizes of at least 1; try \[256, 128\]"),
        (MLP, {"hidden": (8, -1)}, r"hidden=\[8, -1\] must be"),
        (MLP, {"dropout": 1.5}, "dropout=1.5 must be at least 0 and below 1; try 0.1"),
        (MLP, {"dropout": 1.0}, "dropout=1.0 must be"),
        (MLP, {"dropout": math.nan}, "dropout=nan must be"),
        (ConvNet, {"channels": [16]}, r"channels=\[16\] must be two sizes of at least 1; try \[16, 32\]"),
        (ConvNet, {"channels": (16, 32, 64)}, r"channels=\[16, 32, 64\] must be two"),
        (ConvNet, {"channels": (16, 0)}, r"channels=\[16, 0\] must be two"),
    ],
)
def test_options_out_of_range_are_refused(kind, options, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        kind((1, 28, 28), 10, **options)


@pytest.mark.parametrize("sample_shape", [(10,), (28, 28), (1, 3, 28), (1, 28, 3), (1, 1, 28, 28)])
def test_convnet_refuses_what_is_no_image(sample_shape):
    with pytest.raises(ValueError) as raised:
        ConvNet(sample_shape, 10)
    assert str(raised.value) == (
        "convnet needs image samples (channels, height, width) of at least 4 x 4, but the samples have shape "
        f"{sample_shape}; choose a data set of images, such as digits, or another model, such as mlp"
    )


@pytest.mark.parametrize("name", MODELS)
def test_configuration_states_every_option_and_its_default(name):
    text = (CONF / f"{name}.yaml").read_text()
    lines = text.splitlines()
    assert lines[0].startswith("# ") and not lines[0].endswith(".")
    assert all("  # " in line for line in lines[2:])
    options = yaml.safe_load(text)
    module, _, attribute = options.pop("_target_").rpartition(".")
    assert getattr(importlib.import_module(module), attribute) is MODELS[name]
    assert options.pop("sample_shape") == "${data.sample_shape}"
    assert options.pop("num_outputs") == "${data.num_outputs}"
    parameters = list(inspect.signature(MODELS[name]).parameters.values())[2:]
    defaults = {p.name: list(p.default) if isinstance(p.default, tuple) else p.default for p in parameters}
    assert options == defaults
